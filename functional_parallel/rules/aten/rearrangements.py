"""Rules of ops that only rearrange dims. Rules are text if dims keep their identity; views use arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from sharding_specs.blocks import between, inside, units

from ...collectives import DimSplit
from ...ir import RESHAPES, argument, info, tensor_operands
from ..axis_layout import REDUCED, REPLICATED, AxisLayout, Shard
from ..decide import OpSharding
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import along_text, batched_text, dim_names, dim_of, ndim_of, pattern, results_of, whole_along

aten = torch.ops.aten


def _shape(node: fx.Node) -> tuple[int, ...]:
    return info(node).aval.shape


# --- Views ---


def reshaped_place(
    before: Sequence[int], after: Sequence[int], place: AxisLayout, parts: DimSplit
) -> AxisLayout | None:
    """Return the layout of a shard after a reshape, or None if the new dims cut across it.

    The elements of the tensor in order have the factors (major, ranks, minor). A dim of the new shape is sharded if its
    elements have the factors (prefix, ranks, rest) at the same position.

    >>> reshaped_place((4, 6), (24,), Shard(1), DimSplit.of(2))        # "b (h/tensor)" -> "(b h/tensor)"
    Shard(dim=0, outer=4)
    >>> reshaped_place((2, 24), (2, 3, 8), Shard(1, 3), DimSplit.of(4))  # "b (3 h/tensor)" -> "b 3 h/tensor"
    Shard(dim=2, outer=1)
    """
    if not isinstance(place, Shard):
        return place
    if 0 in after:
        return None
    major, ahead = math.prod(before[: place.dim]), 1
    for dim, extent in enumerate(after):
        outer = place.outer if ahead == major else None  # unequal blocks stay in the first dim of their elements
        if isinstance(place.outer, int):
            outer = inside(major * place.outer, ahead)
        if outer is not None and extent > 1 and extent % (units(outer) * parts.samples) == 0:
            return Shard(dim, outer)
        ahead *= extent
    return None


def _decide_view(step: OpContext) -> OpSharding:
    operand = step.operands[0]
    place = reshaped_place(operand.aval.shape, step.result().shape, operand.place, step.parts)
    return OpSharding((REPLICATED,), (REPLICATED,)) if place is None else OpSharding((operand.place,), (place,))


def _local_reshape(step: OpContext, x: Tensor, *_: Argument, **__: Argument) -> Tensor:
    return x.reshape(step.local_result_shape())


rule(RESHAPES, Rule(decide=_decide_view, local=_local_reshape, moves_only=True))


# --- Dims renamed, added and removed ---


def _reordered_text(node: fx.Node) -> str:
    names = dim_names(ndim_of(node))
    turned = list(names)
    if node.target is aten.permute.default:
        turned = [names[index] for index in node.args[1]]
    elif names:
        first, second = node.args[1:] or (0, -1)
        turned[first], turned[second] = names[second], names[first]
    return f"~{pattern(names)} -> {pattern(turned)}"


def _unsqueeze_text(node: fx.Node) -> str:
    names = dim_names(ndim_of(node))
    where = node.args[1] % (len(names) + 1)
    return f"~{pattern(names)} -> {pattern([*names[:where], '1', *names[where:]])}"


def _squeeze_text(node: fx.Node) -> str:
    shape = _shape(node.args[0])
    dims = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = [dims] if isinstance(dims, int) else dims
    dropped = {dim % len(shape) for dim in dims if shape and shape[dim] == 1}
    left, right = (dim_names(len(shape), dict.fromkeys(dropped, name)) for name in ("1", ""))
    return f"~{pattern(left)} -> {pattern(right)}"


def _expand_text(node: fx.Node) -> str:
    before, after = _shape(node.args[0]), _shape(node)
    extra = len(after) - len(before)
    grown = ["1" if size == 1 and after[extra + dim] != 1 else f"d{dim}" for dim, size in enumerate(before)]
    right = [f"new{dim}" for dim in range(extra)]
    right += [f"new{extra + dim}" if name == "1" else name for dim, name in enumerate(grown)]
    return f"~{pattern(grown)} -> {pattern(right)}"


def _local_expand(step: OpContext, x: Tensor, shape: Sequence[int], **_: bool) -> Tensor:
    return x.expand(step.local_result_shape())


rule([aten.t.default, aten.transpose.int, aten.permute.default], Rule(_reordered_text))
rule([aten.unsqueeze.default], Rule(_unsqueeze_text))
rule([aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims], Rule(_squeeze_text, _local_reshape))
rule([aten.expand.default], Rule(_expand_text, _local_expand))


# --- Slices and concatenations: replicated along the dim; other dims may be sharded ---


def _cut_place(place: AxisLayout, dim: int, extent: int, start: int, length: int) -> AxisLayout | None:
    """Return the layout of `length` elements from `start`, if they are full blocks outside the ranks' factor."""
    # In this way a fused `"embed (3 heads/tensor)"` is split into three tensors without communication.
    if not isinstance(place, Shard) or place.dim != dim:
        return None
    if extent == 0:
        return place
    blocks = between(place.outer, extent, start, length)
    return None if blocks is None else Shard(dim, blocks)


def _strided_place(
    place: AxisLayout, dim: int, extent: int, start: int, length: int, stride: int, parts: DimSplit
) -> AxisLayout | None:
    if not isinstance(place, Shard) or place.dim != dim or start >= stride:
        return None
    divides = (extent // units(place.outer)) % (parts.samples * stride) == 0
    return place if divides and length * stride == extent else None


def _decide_slice(step: OpContext) -> OpSharding | None:
    dim, (start, end, stride) = dim_of(step.node), _bounds(step.node)
    operand, length = step.operands[0], step.result().shape[dim_of(step.node)]
    extent = operand.aval.shape[dim]
    if stride == 1:
        place = _cut_place(operand.place, dim, extent, start, end - start)
    else:
        place = _strided_place(operand.place, dim, extent, start, length, stride, step.parts)
    return None if place is None else OpSharding((operand.place,), (place,))


def _local_slice(step: OpContext, x: Tensor, *args: int | None, **kwargs: int | None) -> Tensor:
    dim, (start, end, stride) = dim_of(step.node), _bounds(step.node)
    place = step.decision.operands[0]
    if isinstance(place, Shard) and place.dim == dim:
        start, end = (step.parts.local(start), step.parts.local(end)) if stride == 1 else (start, x.shape[dim])
    return step.run(x, dim, start, end, stride)


def _bounds(node: fx.Node) -> tuple[int, int, int]:
    extent, stride = _shape(node.args[0])[dim_of(node)], argument(node, "step")
    start, end, _ = slice(argument(node, "start"), argument(node, "end"), stride).indices(extent)
    return start, max(start, end), stride


def _decide_split(step: OpContext) -> OpSharding | None:
    dim, operand = dim_of(step.node), step.operands[0]
    places, start = [], 0
    for result in info(step.node).avals:
        places.append(_cut_place(operand.place, dim, operand.aval.shape[dim], start, result.shape[dim]))
        start += result.shape[dim]
    if any(place is None for place in places):
        return None
    return OpSharding((operand.place,), tuple(place for place in places if place is not None))


def _local_split(
    step: OpContext, x: Tensor, *args: int | Sequence[int], **kwargs: int | Sequence[int]
) -> Sequence[Tensor]:
    dim = dim_of(step.node)
    lengths = [step.local_result_shape(index)[dim] for index in range(len(step.results))]
    pieces: Sequence[Tensor] = step.emit(aten.split_with_sizes.default, (x, lengths, dim), {})
    return pieces


def _taken_text(*dims: str, left: str = "") -> Callable[[fx.Node], str]:
    """Return the rule of a view that selects from `dims`, which are replicated. `left` names a new last dim."""

    def text(node: fx.Node) -> str:
        ndim = ndim_of(node)
        taken = [argument(node, name) % ndim for name in dims]
        whole = pattern(dim_names(ndim, {dim: f"d{dim}^" for dim in taken}))
        rest = pattern([*dim_names(ndim, dict.fromkeys(taken, "")), left])
        return f"~{whole} -> {', '.join([rest] * results_of(node))}"

    return text


def _put_back_text(*dims: str, part: Sequence[str]) -> Callable[[fx.Node], str]:
    """Return the rule of an op that writes a slice into the full tensor. `part` names `dims` in the slice."""

    def text(node: fx.Node) -> str:
        ndim = ndim_of(node)
        taken = [argument(node, name) % ndim for name in dims]
        whole = pattern(dim_names(ndim, {dim: f"d{dim}^" for dim in taken}))
        of_part = pattern([*dim_names(ndim, dict(zip(taken, part, strict=False))), *part[len(taken) :]])
        return f"&{whole}, &{of_part} -> {pattern(dim_names(ndim, {dim: f'new{dim}' for dim in taken}))}"

    return text


def _cat_text(node: fx.Node) -> str:
    ndim, dim = len(_shape(node)), argument(node, "dim") % len(_shape(node))
    parts = [f"&{pattern(dim_names(ndim, {dim: f'c{index}^'}))}" for index in range(len(tensor_operands(node)))]
    return f"{', '.join(parts)} -> {pattern(dim_names(ndim, {dim: 'new'}))}"


def _decide_cat(step: OpContext) -> OpSharding | None:
    """Concatenate along the sharded dim, if the operands are sharded in blocks of one length.

    The result is then sharded in these blocks. An example is the two halves of a batch of pairs. Replicated operands
    are sliced, unless they have more bytes than the sharded operands. Empty tensors are unchanged.
    """
    dim = argument(step.node, "dim") % len(step.result().shape)
    filled = [operand for operand in step.operands if operand.aval.shape[dim]]
    held = [operand for operand in filled if isinstance(operand.place, Shard)]
    whole = [operand for operand in filled if operand.place in (REPLICATED, REDUCED)]
    places = [place for operand in held if isinstance(place := operand.place, Shard)]
    if not step.parts.is_even or len(held) + len(whole) < len(filled) or {p.dim for p in places} != {dim}:
        return None
    if any(isinstance(place.outer, tuple) for place in places):
        return None
    block, *others = {operand.aval.shape[dim] // units(p.outer) for operand, p in zip(held, places, strict=True)}
    lengths = [operand.aval.shape[dim] for operand in filled]
    larger = sum(operand.aval.nbytes for operand in whole) > sum(operand.aval.nbytes for operand in held)
    if others or larger or any(length % block for length in lengths):
        return None
    required = [Shard(dim, operand.aval.shape[dim] // block or 1) for operand in step.operands]
    return OpSharding(tuple(required), (Shard(dim, sum(lengths) // block),))


def _stack_text(node: fx.Node) -> str:
    names, dim = dim_names(len(_shape(node)) - 1), argument(node, "dim") % len(_shape(node))
    parts = [f"&{pattern(names)}"] * len(tensor_operands(node))
    return f"{', '.join(parts)} -> {pattern([*names[:dim], 'new', *names[dim:]])}"


def _turned_text(node: fx.Node) -> str:
    ndim, dims = ndim_of(node), argument(node, "dims")
    if node.target is aten.roll.default:
        dims = dims or range(ndim)
    return whole_along(*(dim % ndim for dim in dims), ndim=ndim)


def _pad_text(node: fx.Node) -> str:
    ndim = ndim_of(node)
    padded = [ndim - 1 - index // 2 for index, amount in enumerate(node.args[1]) if amount]
    return whole_along(*padded, ndim=ndim, mark="" if argument(node, "value") else "~")


def _repeat_text(node: fx.Node) -> str:
    ndim, counts = ndim_of(node), list(node.args[1])
    extra = len(counts) - ndim
    repeated = [dim for dim in range(ndim) if counts[extra + dim] != 1]
    left = pattern(dim_names(ndim, {dim: f"d{dim}^" for dim in repeated}))
    ahead, behind = (f"newahead{dim}" for dim in range(extra)), {dim: f"new{dim}" for dim in repeated}
    return f"~{left} -> {pattern([*ahead, *dim_names(ndim, behind)])}"


def _unfold_text(node: fx.Node) -> str:
    ndim, dim = ndim_of(node), argument(node, "dimension") % max(ndim_of(node), 1)
    left, right = (dim_names(ndim, {dim: name}) for name in (f"d{dim}^", "new"))
    return f"~{pattern(left)} -> {pattern([*right, 'newsize'])}"


def _bits_text(node: fx.Node) -> str:
    before, after = info(node.args[0]).aval, info(node).aval
    return "... -> ..." if before.dtype.itemsize == after.dtype.itemsize else batched_text(1)(node)


rule([aten.slice.Tensor], Rule(along_text("~"), _local_slice, _decide_slice))
rule([aten.constant_pad_nd.default], Rule(_pad_text))
rule([aten.select.int, aten.unbind.int], Rule(_taken_text("dim")))
rule(
    [aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor],
    Rule(along_text("~"), _local_split, _decide_split),
)
rule([aten.cat.default], Rule(_cat_text, decide=_decide_cat))
rule([aten.stack.default], Rule(_stack_text))
rule([aten.flip.default, aten.roll.default], Rule(_turned_text))
rule([aten.tril.default, aten.triu.default], Rule(batched_text(2, linear="~")))
rule([aten.repeat.default], Rule(_repeat_text))
rule([aten.slice_scatter.default], Rule(_put_back_text("dim", part=["part^"])))
rule([aten.select_scatter.default], Rule(_put_back_text("dim", part=[""])))
rule([aten.unfold.default], Rule(_unfold_text))
rule([aten.diagonal.default], Rule(_taken_text("dim1", "dim2", left="new")))
rule([aten.diagonal_scatter.default], Rule(_put_back_text("dim1", "dim2", part=["", "", "part^"])))
rule([aten.diag_embed.default], Rule(batched_text(1, linear="~")))
rule([aten.trace.default], Rule("~a^ b^ -> ()"))
rule([aten.view_as_real.default], Rule(batched_text(0, linear="~")))
rule([aten.view.dtype], Rule(_bits_text))
rule([aten.view_as_complex.default], Rule(batched_text(1, linear="~")))
