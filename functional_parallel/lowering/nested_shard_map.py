"""Calls of a `shard_map` function in a trace: a region of the traced program that is local to more axes.

In a plan, a value is replicated along the axes that no transform splits. The call slices its operands along the axes of
its specs, which needs no communication. It then runs the body on the slices and gathers the results. The body is traced
and typed separately, so that differentiation sees every cast that its types imply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, broadcast_specs, require_dims, tree_paths, validate

from .. import _torch
from ..checker import Typing, check_arguments, run_typed, type_of, type_of_spec
from ..collectives import axis_dim_split, current_axes, hide, snapshot
from ..errors import LayoutError, OutSpecError
from ..functions import PyTree, SpecTree, filled, with_keywords
from ..ir import Traced, aval_of, current_source
from ..partition import axis_layout_of
from ..rules import REPLICATED, convert
from ..tracing import depends_on_layouts, recorder, trace
from .lower import mismatch, per_argument


def call_shard_map(
    f: Callable[..., PyTree], mesh: Mesh, in_specs: SpecTree, out_specs: SpecTree, name: str, args: tuple[PyTree, ...]
) -> PyTree:
    """Call a body on slices of values that are replicated in the surrounding trace, and return the full results.

    The arguments must be replicated along all axes of the mesh that are visible here. The plan around the call must not
    split an axis of the specs. The specs may not have partial sums, reduced axes or padding.
    """
    specs = per_argument(in_specs, args, name)
    _check_specs(optree.tree_leaves((specs, out_specs)), mesh, name)
    validate(args, specs, mesh)
    visible = tuple(axis for axis in mesh.axis_names if axis in current_axes())
    args = check_arguments(name, visible, lambda given: tuple(P() for _ in given), args)
    leaves, tree = optree.tree_flatten(args)
    chosen = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    flat = optree.tree_leaves(specs)
    tensors = [_entered(leaves[index], flat[index]) for index in chosen]
    found: dict[str, Any] = {}

    def body(*values: torch.Tensor) -> list[Any]:
        found["result"] = with_keywords(f)(*filled(leaves, chosen, values, tree))
        result: list[Any] = optree.tree_leaves(found["result"])
        return result

    traced = _traced(body, tensors, [flat[index] for index in chosen], visible)
    depends_on_layouts(traced, [leaves[index] for index in chosen], [tree_paths(args)[index] for index in chosen])
    full = broadcast_specs(out_specs, found["result"], name=f"out_specs of {name}", what="what it returned")
    require_dims(found["result"], full, f"the results of {name} (out_specs)")
    results = optree.tree_leaves(full)
    _check_results(traced, results, visible, tree_paths(found["result"]), name)
    outputs = run_typed(traced, [*tensors, *traced.captured])
    whole = [
        _left(output, spec) if isinstance(output, torch.Tensor) else output
        for output, spec in zip(outputs, results, strict=True)
    ]
    return optree.tree_unflatten(optree.tree_structure(found["result"]), whole)


def _traced(
    body: Callable[..., list[Any]], tensors: Sequence[torch.Tensor], specs: Sequence[P], visible: Sequence[str]
) -> Traced:
    active = recorder()
    assert active is not None
    if active.on_node is None:
        types = [type_of_spec(spec) for spec in specs]
    else:
        types = [type_of(active.node_of(_torch.unwrap(tensor))) for tensor in tensors]
    others = [axis for axis in current_axes() if axis not in visible]
    typing = Typing(current_axes())
    with hide(others) if others else nullcontext():
        avals = [aval_of(tensor) for tensor in tensors]
        return trace(body, avals, types=types, forward_only=True, on_node=typing, is_local_body=True)


def _check_results(traced: Traced, specs: Sequence[P], visible: Sequence[str], paths: Sequence[str], name: str) -> None:
    wrong = []
    for output, spec, path in zip(traced.outputs, specs, paths, strict=True):
        if isinstance(output, torch.fx.Node):
            held, wanted = type_of(output), type_of_spec(spec)
            wrong += [
                f"  {path or 'the result'}: {mismatch(axis, held[axis], wanted[axis], spec, output)}"
                for axis in visible
                if held[axis] is not wanted[axis]
            ]
    if wrong:
        raise OutSpecError(f"{_place(name)}: results do not lie as out_specs say:\n" + "\n".join(wrong))


def _entered(x: torch.Tensor, spec: P) -> torch.Tensor:
    for entered, axis in enumerate(axes := _axes_of(spec)):
        x = convert(x, REPLICATED, axis_layout_of(spec, axis, axes[:entered]), axis, axis_dim_split(axis))
    return x


def _left(x: torch.Tensor, spec: P) -> torch.Tensor:
    """Gather the full tensor from the slices of the ranks."""
    axes = _axes_of(spec)
    for entered, axis in reversed(list(enumerate(axes))):
        x = convert(x, axis_layout_of(spec, axis, axes[:entered]), REPLICATED, axis, axis_dim_split(axis))
    return x


def _axes_of(spec: P) -> list[str]:
    return [axis for axes in spec.dim_axes() for axis in axes]


def _check_specs(specs: Sequence[P], mesh: Mesh, name: str) -> None:
    odd = [spec for spec in specs if spec.unreduced or spec.reduced or spec.owner or spec.padded]
    if odd:
        raise LayoutError(
            f"{_place(name)}: {odd[0]!r}: inside a traced function values are whole before and after, and neither "
            "partial sums nor padded; name dims alone"
        )
    bound, named = snapshot(), {axis for spec in specs for axis in spec.axes}
    for axis, size in mesh.shape.items():
        binding = bound.get(axis)
        if binding is None or binding.size != size:
            here = ", ".join(f"{each}={bound[each].size}" for each in bound) or "none"
            raise LayoutError(f"{_place(name)}: its {mesh!r} does not fit the axes bound here: {here}")
        if binding.hidden and axis in named:
            raise LayoutError(
                f"{_place(name)}: the plan around it splits {axis!r} itself, so values are whole along it here: leave "
                f"{axis!r} out of in_specs and out_specs, and write the body globally along it"
            )


def _place(name: str) -> str:
    return f"{current_source() or 'a call'}: {name}"
