"""`outputs(x)`: a marker in model code. After it, the master of data parallelism computes alone."""

from __future__ import annotations

from typing import TypeVar

import optree
import torch

from sharding_specs import register_dataclasses

from ..collectives import hidden_axes
from .marks import define_marker

Tree = TypeVar("Tree")


def outputs(x: Tree) -> Tree:
    """Mark the outputs of a model. With `fp.data_parallel(axis, master=…)` the master gathers them.

    The master alone computes all values that depend on the mark, on the full batch. It is the boundary between the
    model and the loss outside of it, in torch's DataParallel. Without the mark, each rank computes a summand of the
    loss, and the outputs are these summands. Under any other plan, and outside a plan, the mark has no effect.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def loss(w, x, y):
    ...     return (fp.outputs(x @ w) - y).square().sum()
    >>> step = fp.compile(fp.grad(fp.data_parallel("data", master=0)(loss)), Mesh(data=2))
    >>> step(torch.ones(3), torch.ones(4, 3), torch.ones(4))
    tensor([16., 16., 16.])

    Args:
        x: a pytree of tensors.

    Returns:
        The same values.
    """
    register_dataclasses(x)
    marked: Tree = optree.tree_map(lambda leaf: _mark(leaf) if isinstance(leaf, torch.Tensor) else leaf, x)
    return marked


def _mark(x: torch.Tensor) -> torch.Tensor:
    return _Outputs.apply(x) if hidden_axes() else x


_Outputs = define_marker("outputs(Tensor x)", _mark, names_dims=False)
OP = _Outputs.op
