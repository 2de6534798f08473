"""Trace the forward of a plain function before a torch.func transform is applied to it, as the partitioner does.

Code that checks for fake tensors, to avoid reading their values, does not recognise a transform's wrapped ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from sharding_specs import register_dataclasses, tree_paths

from .. import _torch
from ..checker import Typing, known_spec, record_input_specs, run_typed, type_of
from ..collectives import current_axes
from ..ir import aval_of
from ..tracing import CapturedTensors, Recorder, depends_on_layouts, gradients_wanted, recorder, trace
from .request import PyTree
from .resolved import beside


def forward_first(f: Callable[..., PyTree], *, lenient: bool = False) -> Callable[..., PyTree]:
    """Return f, which under a transform in a typed trace runs a trace of its forward, with explicit casts."""

    @functools.wraps(f)
    def call(*args: PyTree, **named: PyTree) -> PyTree:
        active = recorder()
        typed = active is not None and isinstance(active.on_node, Typing)
        if active is None or not typed or not _torch.is_inside_transform() or (lenient and CapturedTensors(f).tensors):
            return f(*args, **named)
        register_dataclasses(args, named)
        return _run_traced(f, active, *optree.tree_flatten((args, named)))

    return call


def filled(leaves: list[PyTree], indices: list[int], values: Sequence[PyTree], tree: optree.PyTreeSpec) -> PyTree:
    whole = list(leaves)
    for index, value in zip(indices, values, strict=True):
        whole[index] = value
    return tree.unflatten(whole)


def _run_traced(f: Callable[..., PyTree], active: Recorder, leaves: list[PyTree], tree: optree.PyTreeSpec) -> PyTree:
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    every = [path for given in tree.unflatten(leaves) for path in tree_paths(given)]
    paths, specs = [every[index] for index in tensors], [known_spec(leaves[index]) for index in tensors]

    def run(*values: torch.Tensor) -> tuple[list[Any], optree.PyTreeSpec]:
        record_input_specs(specs)
        args, named = filled(leaves, tensors, values, tree)
        result = f(*args, **named)
        register_dataclasses(result)
        outputs, out_tree = optree.tree_flatten(result)
        return list(outputs), out_tree

    flat, structure = beside(run)

    with _torch.counting_levels(), gradients_wanted(True):
        traced = trace(
            flat,
            [aval_of(leaves[index]) for index in tensors],
            types=[type_of(active.node_of(_torch.unwrap(leaves[index]))) for index in tensors],
            forward_only=True,
            on_node=Typing(current_axes()),
            is_local_body=active.is_local_body,
            paths=paths,
        )
    depends_on_layouts(traced, [leaves[index] for index in tensors], paths)
    outputs = run_typed(traced, [*(leaves[index] for index in tensors), *traced.captured])
    return optree.tree_unflatten(structure(), outputs)
