"""Specs that are attached to parameters at their creation and removed before any computation."""

from __future__ import annotations

from typing import Any

import optree
import torch

from .annotated import Annotated
from .dataclass_nodes import register_dataclasses
from .errors import SpecError
from .notation import parse_dims
from .pytree import Tree
from .spec import P, as_spec


def annotate(value: torch.Tensor, spec: P | str) -> Annotated:
    """Attach a spec to a parameter at its creation. `split` removes it.

    >>> import torch
    >>> params, specs = split({"wte": annotate(torch.zeros(8, 4), "vocab/tensor embed"), "scale": torch.ones(4)})
    >>> params["wte"].shape, specs
    (torch.Size([8, 4]), {'wte': P('tensor'), 'scale': P()})

    Args:
        value: a tensor.
        spec: a spec or its string form.

    Raises:
        SpecError: when a spec has more dims than the tensor, or a string form without `...` has another number of dims.
    """
    parsed = as_spec(spec)
    ndim = getattr(value, "ndim", None)
    if (
        isinstance(spec, str)
        and ndim is not None
        and "..." not in spec
        and (named := len(parse_dims(spec, {}))) != ndim
    ):
        raise SpecError(f"annotate: {spec!r} names {named} dims, the tensor has shape {tuple(value.shape)}")
    if ndim is not None and parsed.named > ndim:
        raise SpecError(
            f"annotate: {parsed.as_written()} has {parsed.named} dims, the tensor has shape {tuple(value.shape)}"
        )
    return Annotated(value, parsed)


def split(tree: Tree) -> tuple[Any, Any]:
    """Separate a tree of annotated values into parameters and specs. A value without a spec is replicated.

    Args:
        tree: any pytree.

    Returns:
        `(params, specs)`, two trees of the same structure.
    """
    register_dataclasses(tree)
    values = optree.tree_map(lambda leaf: leaf.value if isinstance(leaf, Annotated) else leaf, tree)
    specs = optree.tree_map(lambda leaf: leaf.spec if isinstance(leaf, Annotated) else P(), tree)
    return values, specs
