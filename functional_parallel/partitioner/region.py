"""Region of a plan's function: the body of a `shard_map` call, as one node of a traced graph.

The node has the body and its specs as arguments. Partitioning an axis replaces it, until no axis of its specs is left:

- An axis of its specs: the operands are converted to the specs' layouts, and the axis becomes visible to the body. At
  the last axis the body is typed and becomes part of the graph. An operand that is Reduced stays Reduced where its spec
  is replicated, so that its gradient is summed by the transpose of the op that gathered it.
- Another axis: the body itself is partitioned, and the result is a region again.

A region is closed under derivatives: its pullback, pushforward or vmap is a region with the same body. They are taken
of the body when its types are known, because a cast that the types imply decides where a gradient is summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sharding_specs import Mesh, P

from .. import _torch
from ..checker import Typing, run_typed, type_of
from ..collectives import (
    DimSplit,
    State,
    Type,
    apply_primitive,
    current_axes,
    dual,
    hide,
    keeping_grad_mode,
    mesh_axis_size,
    unhide,
)
from ..errors import TypingError
from ..functions import axis_mesh, forward_first
from ..ir import (
    Aval,
    Source,
    Traced,
    current_source,
    info,
    is_trained,
    program_text,
    register_differentiable,
    update_info,
)
from ..rules import REDUCED, REPLICATED, AxisLayout, Reduced, Replicated, Shard, convert, shard_shape
from ..tracing import recorder, trace
from .preparation import prepare

Body = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Border:
    """Shape, spec and type of an operand or a result. The shape is local along the axes of the spec."""

    aval: Aval
    spec: P
    type: Type

    def whole(self, hidden: Sequence[str]) -> Aval:
        shape = list(self.aval.shape)
        for dim, axes in enumerate(self.spec.dim_axes()):
            shape[dim] *= math.prod(mesh_axis_size(axis) for axis in axes if axis in hidden)
        return replace(self.aval, shape=tuple(shape))

    def sharded(self, place: AxisLayout, cut: DimSplit) -> Border:
        return replace(self, aval=replace(self.aval, shape=shard_shape(self.aval.shape, place, cut)))

    def dual(self) -> Border:
        return replace(self, type=dual(self.type))

    def mapped(self, size: int) -> Border:
        aval = replace(self.aval, shape=(size, *self.aval.shape))
        return replace(self, aval=aval, spec=self.spec.replace([None, *self.spec.dims]))


@dataclass(frozen=True, eq=False)
class Region:
    """Body with the borders of its operands and results.

    The axes of the specs are visible to the body. Those in `hidden` are not partitioned yet. `derivatives` are taken of
    the body in this order. `known` has what was derived from the region, for equal calls.
    """

    name: str
    body: Traced
    operands: tuple[Border, ...]
    results: tuple[Border, ...]
    hidden: tuple[str, ...]
    derivatives: tuple[Callable[[Body], Body], ...] = ()
    known: dict[Any, Any] = field(default_factory=dict)

    def derived(self, of: Callable[[Body], Body], operands: Sequence[Border], results: Sequence[Border]) -> Region:
        derivatives = (*self.derivatives, of)
        return replace(self, operands=tuple(operands), results=tuple(results), derivatives=derivatives, known={})

    def having(self, axis: str, operands: Sequence[State], results: Sequence[State]) -> Region:
        own, out = _in_states(self.operands, axis, operands), _in_states(self.results, axis, results)
        return replace(self, operands=own, results=out, known={})

    def typed(self, call: Source | None) -> Traced:
        def body(*values: Tensor) -> Sequence[Tensor]:
            active = recorder()
            assert active is not None
            held = [type_of(active.node_of(_torch.unwrap(value))) for value in values]
            return run_typed(_typed_copy(self.body, held, call), values)

        types, derivative = [border.type for border in self.operands], body
        with unhide(self.hidden):
            if not self.derivatives:
                return _typed_copy(self.body, types, call)
            for of in self.derivatives:
                derivative = forward_first(of(derivative))
            avals, typing = [border.aval for border in self.operands], Typing(current_axes())
            return trace(derivative, avals, types=types, forward_only=True, on_node=typing, is_local_body=True)

    def __repr__(self) -> str:
        names = [[str(index) for index in range(len(nodes))] for nodes in (self.body.inputs, self.body.outputs)]
        specs = [[border.spec for border in borders] for borders in (self.operands, self.results)]
        body = program_text(self.body, Mesh(), *names, sources=False).replace("\n", "; ")
        of = "".join(f"{each.__name__} of " for each in reversed(self.derivatives))
        return f"{of}{self.name} from {specs[0]} to {specs[1]}: {{{body}}}"


def _in_states(borders: Sequence[Border], axis: str, states: Sequence[State]) -> tuple[Border, ...]:
    pairs = zip(borders, states, strict=True)
    return tuple(replace(border, type=border.type.having([axis], state)) for border, state in pairs)


def _typed_copy(body: Traced, types: Sequence[Type], call: Source | None) -> Traced:
    typed, typing = body.copy()[0], Typing(current_axes())
    for node, type_ in zip(typed.inputs, types, strict=True):
        update_info(node, type=type_)
    for node in typed.nodes:
        source = info(node).source
        if source is not None and call is not None:
            update_info(node, source=replace(source, region=source.region or call.region, stage=call.stage))
        typing(node)
    return typed


# --- Partition along an axis ---

# partitions a body, given layouts and parts of its operands, and returns parts and layouts of its results
PartitionBody = Callable[[Traced, Sequence[AxisLayout], Sequence[Tensor]], tuple[list[Any], list[AxisLayout]]]

_I, _U, _R = State.INVARIANT, State.UNREDUCED, State.REDUCED
_STATES: dict[type[Any], State] = {Shard: State.VARYING, Replicated: _I, Reduced: _R}
_WHOLE: dict[State, AxisLayout] = {_I: REPLICATED, _R: REDUCED, _U: REPLICATED}


def operand_layouts(region: Region, held: Sequence[AxisLayout], axis: str) -> list[AxisLayout]:
    """Return a region's operand layouts along an axis, given the layouts of the values."""
    places = [_taken(border, place, axis, region) for border, place in zip(region.operands, held, strict=True)]
    if axis in region.hidden and REDUCED in places:
        try:
            _entered(region, places, axis).typed(current_source())
        except TypingError:  # the body does not accept a Reduced value, for example because it slices it
            return [REPLICATED if place == REDUCED else place for place in places]
    return places


def _taken(border: Border, held: AxisLayout, axis: str, region: Region) -> AxisLayout:
    wanted = _of_spec(border, axis, region)
    if isinstance(wanted, Shard):
        return wanted
    if isinstance(held, Reduced):
        return REDUCED if border.aval.is_differentiable else REPLICATED
    is_kept = isinstance(held, Shard) and axis not in region.hidden and _is_free(border, held)
    return held if is_kept else REPLICATED


def _is_free(border: Border, place: Shard) -> bool:
    return place.dim >= len(border.spec.dims) or not border.spec.dims[place.dim]


def _of_spec(border: Border, axis: str, region: Region) -> AxisLayout:
    return axis_layout_of(border.spec, axis, sorted(border.spec.axes.difference(region.hidden)))


def axis_layout_of(spec: P, axis: str, inner: Sequence[str]) -> AxisLayout:
    """Return the layout of a spec along one axis, for a value that is local to the inner axes already."""
    if axis in spec.reduced:
        return REDUCED
    if axis not in spec.axes:
        return REPLICATED
    own = next(each for each in spec.without(inner).placements(axis_mesh()) if each.axis == axis)
    return Shard(own.dim, own.outer)


def peel(
    region: Region, places: Sequence[AxisLayout], parts: Sequence[Tensor], axis: str, cut: DimSplit, run: PartitionBody
) -> tuple[Sequence[Tensor], Sequence[AxisLayout]]:
    """Apply a region to operands in the layouts of `operand_layouts`. Return the results, with their layouts."""
    if axis not in region.hidden:
        key = (axis, *places)
        if key not in region.known:
            region.known[key] = _partitioned(region, places, axis, cut, run)
        local, found = region.known[key]
        return region_node(parts, local), found
    entered = _entered(region, places, axis)
    body = entered.typed(current_source())
    states = [type_of(output)[axis] for output in body.outputs]
    entered = entered.having(axis, [border.type[axis] for border in entered.operands], states)
    outputs = region_node(parts, entered) if entered.hidden else run_typed(body, parts)
    pairs = zip(outputs, states, strict=True)
    summed = [apply_primitive("psum", x, (axis,), "unreduced") if state is _U else x for x, state in pairs]
    found = [_of_spec(border, axis, region) for border in region.results]
    assert [state is State.VARYING for state in states] == [isinstance(place, Shard) for place in found], region
    return summed, [_WHOLE.get(state, place) for place, state in zip(found, states, strict=True)]


def _entered(region: Region, places: Sequence[AxisLayout], axis: str) -> Region:
    entered = replace(region, hidden=tuple(each for each in region.hidden if each != axis))
    held = [_STATES[type(place)] for place in places]
    return entered.having(axis, held, [border.type[axis] for border in region.results])


def _partitioned(
    region: Region, places: Sequence[AxisLayout], axis: str, cut: DimSplit, run: PartitionBody
) -> tuple[Region, list[AxisLayout]]:
    found: list[AxisLayout] = []

    def local(*values: Tensor) -> list[Tensor]:
        outputs, found[:] = run(body, places, values)
        for index, (border, place) in enumerate(zip(region.results, found, strict=True)):
            if isinstance(place, Shard) and not _is_free(border, place):
                outputs[index], found[index] = convert(outputs[index], place, REPLICATED, axis, cut), REPLICATED
        return outputs

    with unhide(region.hidden):
        body = prepare(_global_body(region, axis))
        operands = [border.sharded(place, cut) for border, place in zip(region.operands, places, strict=True)]
        traced = trace(local, [border.aval for border in operands], forward_only=True)
    results = [replace(border, aval=info(x).aval) for border, x in zip(region.results, traced.outputs, strict=True)]
    inner = replace(region, body=traced, operands=tuple(operands), results=tuple(results), derivatives=())
    return inner.having(axis, *([_STATES[type(place)] for place in each] for each in (places, found))), found


def _global_body(region: Region, axis: str) -> Traced:
    if not region.derivatives:
        return region.body.copy()[0]
    with hide(axis):
        typed = region.typed(None)
        avals = [border.aval for border in region.operands]
        return trace(lambda *values: run_typed(typed, values), avals, forward_only=True)


# --- The node ---


def region_node(xs: Sequence[Tensor], region: Region) -> list[Tensor]:
    with keeping_grad_mode():
        return list(_Apply.apply(region, *xs))  # type: ignore[no-untyped-call]


register_differentiable(region_node, region_node)


class _RegionContext(_torch.FunctionContext):
    region: Region


@_torch.without_zeros
class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(region: Region, *xs: Tensor) -> tuple[Tensor, ...]:
        active = recorder()
        assert active is not None
        avals = [border.whole(region.hidden) for border in region.results]
        with _torch.disable_modes(), active.fake_mode:
            made = tuple(torch.empty(aval.shape, dtype=aval.dtype, device=aval.device) for aval in avals)
        active.write(region_node, (list(xs), region), {}, made)  # type: ignore[arg-type]  # no op takes a graph
        active.layouts.leave_unknown(made, xs, region.name)
        return made

    @staticmethod
    def setup_context(ctx: _RegionContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.region, *xs = inputs
        ctx.save_for_backward(*xs)
        ctx.save_for_forward(*xs)
        ctx.mark_non_differentiable(*(x for x in output if not is_trained(x)))

    @staticmethod
    def backward(ctx: _RegionContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        given = {index: each for index, each in enumerate(gradients) if each is not None}
        derivative = _derivative(ctx.region, wanted, list(given), backward=True)
        found = region_node([*ctx.saved_tensors, *given.values()], derivative)
        by_operand = dict(zip(wanted, found, strict=True))
        return None, *map(by_operand.get, range(len(ctx.saved_tensors)))

    @staticmethod
    def jvp(ctx: _RegionContext, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        moving = {index: tangent for index, tangent in enumerate(tangents) if tangent is not None}
        kept = _differentiable(ctx.region.results)
        derivative = _derivative(ctx.region, list(moving), kept, backward=False)
        found = region_node([*ctx.saved_tensors, *moving.values()], derivative)
        by_result = dict(zip(kept, found, strict=True))
        return tuple(map(by_result.get, range(len(ctx.region.results))))

    @staticmethod
    def vmap(
        info: _torch.VmapInfo, in_dims: Sequence[int | None], region: Region, *xs: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        moved = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(xs, in_dims[1:], strict=True)]
        found = region_node(moved, _mapped(region, [dim is not None for dim in in_dims[1:]], info.batch_size))
        return tuple(found), (0,) * len(found)


# --- Derivatives of a region ---


def _differentiable(borders: Sequence[Border]) -> list[int]:
    return [index for index, border in enumerate(borders) if border.aval.is_differentiable]


def _derivative(region: Region, moving: Sequence[int], kept: Sequence[int], backward: bool) -> Region:
    """Return the region that also takes gradients of the results `kept`, or tangents of the operands `moving`."""
    count = len(region.operands)

    def derivative(body: Body) -> Body:
        def run(*values: Tensor) -> Sequence[Tensor]:
            def function(*given: Tensor) -> tuple[Tensor, ...]:
                whole = dict(enumerate(values[:count])) | dict(zip(moving, given, strict=True))
                found = body(*whole.values())
                return tuple(found[index] for index in kept)

            primals, others = tuple(values[index] for index in moving), values[count:]
            transform: Any = torch.func.vjp if backward else torch.func.jvp
            found = transform(function, *primals)[1](others) if backward else transform(function, primals, others)[1]
            return found  # type: ignore[no-any-return]

        return run

    ends = [region.operands[index] for index in moving], [region.results[index] for index in kept]
    given, found = ([border.dual() for border in end] for end in ends[::-1]) if backward else ends
    return region.derived(derivative, [*region.operands, *given], found)


def _mapped(region: Region, dims: Sequence[bool], size: int) -> Region:
    def vmap(body: Body) -> Body:
        return torch.func.vmap(body, tuple(0 if is_mapped else None for is_mapped in dims))

    pairs = zip(region.operands, dims, strict=True)
    operands = [border.mapped(size) if is_mapped else border for border, is_mapped in pairs]
    return region.derived(vmap, operands, [border.mapped(size) for border in region.results])
