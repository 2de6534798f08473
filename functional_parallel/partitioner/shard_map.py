"""Calls of a `shard_map` function in a trace: a region of the traced program that is local to more axes.

The body is traced on shards and typed at the call, where its errors appear. Along axes that no transform splits, values
are replicated. The call slices its operands along them, which needs no communication, and gathers the results. Axes
that a transform splits are left to their partition (see `region`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, broadcast_specs, require_dims, tree_paths, validate

from .. import _torch
from ..checker import Typing, check_arguments, mismatch, run_typed, type_of, type_of_spec
from ..collectives import State, Type, axis_dim_split, current_axes, hidden_axes, hide, snapshot, unhide
from ..errors import LayoutError, OutSpecError, UnboundAxisError
from ..functions import PyTree, SpecTree, filled, with_keywords
from ..ir import Aval, Traced, current_source, info, leaf_signature, raising_source, recompute_region
from ..random import sites_drawn
from ..rules import REPLICATED, convert
from ..tracing import ReachedState, Recorder, autocast_dtypes, depends_on_layouts, recorder, trace
from .region import Border, Region, axis_layout_of, region_node


def call_shard_map(
    f: Callable[..., PyTree], mesh: Mesh, specs: SpecTree, out_specs: SpecTree, name: str, args: tuple[PyTree, ...]
) -> PyTree:
    """Call a body on shards of values that are global in the surrounding trace, and return global results.

    `specs` has one spec per leaf of the arguments. The arguments must be replicated along all axes of the mesh that are
    visible here. The specs may not have partial sums, reduced axes or padding.
    """
    active = recorder()
    assert active is not None
    _check_specs(optree.tree_leaves((specs, out_specs)), mesh, name, active)
    validate(args, specs, mesh)
    visible = tuple(axis for axis in mesh.axis_names if axis in current_axes())
    args = check_arguments(name, visible, [P()] * len(optree.tree_leaves(args)), args)
    call = _Call(active, f, mesh, optree.tree_leaves(specs), out_specs, name, args)
    region, captured, tree, leaves = call.traced_once()
    depends_on_layouts(region.body, call.tensors, [tree_paths(args)[index] for index in call.chosen])
    tensors = _crossed([*call.tensors, *captured], region.operands, visible, inwards=True)
    outputs = region_node(tensors, region) if region.hidden else run_typed(region.typed(current_source()), tensors)
    whole = iter(_crossed(outputs, region.results, visible, inwards=False))
    return tree.unflatten([next(whole) if leaf is _TENSOR else leaf for leaf in leaves])


# A region, the traced tensors that its body reads, and structure and leaves of its results, with marks for tensors
_Body = tuple[Region, list[torch.Tensor], optree.PyTreeSpec, list[PyTree]]
_TENSOR, _KNOWN = object(), "bodies of shard_map"


class _Call:
    def __init__(
        self,
        active: Recorder,
        f: Callable[..., PyTree],
        mesh: Mesh,
        specs: list[P],
        out_specs: SpecTree,
        name: str,
        args: tuple[PyTree, ...],
    ) -> None:
        self.active, self.f, self.mesh, self.out_specs, self.name = active, f, mesh, out_specs, name
        self.leaves, self.structure = optree.tree_flatten(args)
        self.chosen = [index for index, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [self.leaves[index] for index in self.chosen]
        self.named = {axis for spec in [*specs, *optree.tree_leaves(out_specs)] for axis in spec.axes}
        self.operands = [self._border(self.leaves[index], specs[index]) for index in self.chosen]

    def _border(self, x: torch.Tensor, spec: P) -> Border:
        shape, held = list(x.shape), Type()
        for dim, axes in enumerate(spec.dim_axes()):
            shape[dim] //= math.prod(map(self.mesh.axis_size, axes))
        if self.active.on_node is not None:
            held = type_of(self.active.node_of(_torch.unwrap(x)))
        return Border(Aval(tuple(shape), x.dtype, x.device), spec, held.having(spec.axes, State.VARYING))

    def traced_once(self) -> _Body:
        """Return the traced body. Equal calls share it, unless it reads a traced value or draws random numbers."""
        state = ReachedState(self.f)
        signatures = [leaf_signature(leaf, exact=True) for leaf in self.leaves]
        outs, out_tree = optree.tree_flatten(self.out_specs)
        given = (self.structure, *signatures, *self.operands, self.mesh, *outs, out_tree)
        key = (state.key, given, *snapshot().items(), autocast_dtypes())
        known: dict[Any, Any] = self.active.notes.setdefault(_KNOWN, {})
        if key not in known:
            drawn, body = sites_drawn(), self._traced()
            own = any(node.region is not None for each in body[0].body.nodes if (node := info(each).source) is not None)
            if body[1] or own or sites_drawn() != drawn:
                return body
            known[key] = body, state.kept
        found: _Body = known[key][0]
        return found

    def _traced(self) -> _Body:
        found: dict[str, Any] = {}

        def body(*values: torch.Tensor) -> list[torch.Tensor]:
            found["result"] = with_keywords(self.f)(*filled(self.leaves, self.chosen, values, self.structure))
            found["leaves"], found["tree"] = optree.tree_flatten(found["result"])
            return [leaf for leaf in found["leaves"] if isinstance(leaf, torch.Tensor)]

        hidden = tuple(axis for axis in hidden_axes() if axis in self.named)
        avals, types = [border.aval for border in self.operands], [border.type for border in self.operands]
        with unhide(hidden), recompute_region(None):  # the lines of equal calls may be in different regions
            typing = Typing(current_axes())
            others = [axis for axis in current_axes() if axis not in self.mesh.axis_names]
            with hide(others) if others else nullcontext():
                try:
                    traced = trace(body, avals, types=types, forward_only=True, on_node=typing, is_local_body=True)
                except UnboundAxisError as error:
                    way_out = f"name the axis in the specs of {self.name}"
                    raise UnboundAxisError(f"{raising_source(error)}: {error}, or {way_out}") from error
                specs = self._checked(traced, found["result"], [*current_axes()])
        operands, captured = list(self.operands), traced.captured
        operands += [Border(info(node).aval, P(), type_of(node)) for node in traced.captured_inputs]
        results = [Border(info(x).aval, spec, type_of(x)) for x, spec in zip(traced.outputs, specs, strict=True)]
        traced.inputs, traced.captured_inputs, traced.captured = [*traced.inputs, *traced.captured_inputs], [], []
        leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in found["leaves"]]
        return Region(self.name, traced, tuple(operands), tuple(results), hidden), captured, found["tree"], leaves

    def _checked(self, traced: Traced, result: PyTree, axes: Sequence[str]) -> list[P]:
        full = broadcast_specs(self.out_specs, result, name=f"out_specs of {self.name}", what="what it returned")
        require_dims(result, full, f"the results of {self.name} (out_specs)")
        triples = zip(optree.tree_leaves(result), optree.tree_leaves(full), tree_paths(result), strict=True)
        specs = [(spec, path) for leaf, spec, path in triples if isinstance(leaf, torch.Tensor)]
        wrong = [
            f"  {path or 'the result'}: {mismatch(axis, type_of(output)[axis], type_of_spec(spec)[axis], spec, output)}"
            for output, (spec, path) in zip(traced.outputs, specs, strict=True)
            for axis in axes
            if type_of(output)[axis] is not type_of_spec(spec)[axis]
        ]
        if wrong:
            raise OutSpecError(f"{_place(self.name)}: results do not lie as out_specs say:\n" + "\n".join(wrong))
        return [spec for spec, _ in specs]


# --- Axes that no transform splits ---


def _crossed(
    values: Sequence[torch.Tensor], borders: Sequence[Border], visible: Sequence[str], inwards: bool
) -> list[torch.Tensor]:
    way, crossed = 1 if inwards else -1, list(values)
    for index, border in enumerate(borders):
        axes = [axis for axes in border.spec.dim_axes() for axis in axes if axis in visible]
        for entered, axis in list(enumerate(axes))[::way]:
            held, wanted = (REPLICATED, axis_layout_of(border.spec, axis, axes[:entered]))[::way]
            crossed[index] = convert(crossed[index], held, wanted, axis, axis_dim_split(axis))
    return crossed


def _check_specs(specs: Sequence[P], mesh: Mesh, name: str, active: Recorder) -> None:
    odd = [spec for spec in specs if spec.unreduced or spec.reduced or spec.owner or spec.padded or spec.storage]
    if odd:
        raise LayoutError(
            f"{_place(name)}: {odd[0]!r}: inside a traced function values are whole before and after, and neither "
            "partial sums nor padded nor stored; name dims alone"
        )
    bound = snapshot()
    for axis, size in mesh.shape.items():
        binding = bound.get(axis)
        if binding is None or binding.size != size:
            here = ", ".join(f"{each}={bound[each].size}" for each in bound) or "none"
            raise LayoutError(f"{_place(name)}: its {mesh!r} does not fit the axes bound here: {here}")
        if binding.hidden and active.on_node is not None and any(axis in spec.axes for spec in specs):
            raise LayoutError(
                f"{_place(name)}: it is called in the body of another shard_map, whose specs do not name {axis!r}, an "
                "axis that the plan splits; name it there"
            )


def _place(name: str) -> str:
    return f"{current_source() or 'a call'}: {name}"
