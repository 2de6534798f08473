"""Ops that only move dims about: text where dims keep their identity, arithmetic for views, which do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...collectives.parts import Parts
from ...tracing.graph import named_arguments
from ..decide import Decision
from ..placement import WHOLE, Place, Shard
from ..step import Step
from .batched import batched_text
from .broadcast import dim_names, tensor_operands
from .registry import Rule, rule

aten = torch.ops.aten


def _shape(node: Any) -> tuple[int, ...]:
    return node.meta["val"].shape


def _ndim(node: fx.Node) -> int:
    return len(_shape(node.args[0]))


# -----------------------------------------------------------------------------
# Views
# -----------------------------------------------------------------------------


def reshaped_place(before: Sequence[int], after: Sequence[int], place: Place, parts: Parts) -> Place | None:
    """Where a shard lies after a reshape, or None if the new dims cut across it.

    The tensor's elements in order read (major, ranks, minor). A dim of the new shape carries the ranks' factor if its
    own elements read (prefix, ranks, rest) at the same position.

    >>> reshaped_place((4, 6), (24,), Shard(1), Parts.of(2))        # "b (h/tensor)" -> "(b h/tensor)"
    Shard(dim=0, outer=4)
    >>> reshaped_place((2, 24), (2, 3, 8), Shard(1, 3), Parts.of(4))  # "b (3 h/tensor)" -> "b 3 h/tensor"
    Shard(dim=2, outer=1)
    """
    if not isinstance(place, Shard):
        return place
    if 0 in after:
        return None
    major = math.prod(before[: place.dim]) * place.outer
    ahead = 1
    for dim, extent in enumerate(after):
        if major % ahead == 0 and extent > 1 and (ahead * extent) % (major * parts.samples) == 0:
            return Shard(dim, major // ahead)
        ahead *= extent
    return None


def _decide_view(step: Step) -> Decision:
    operand = step.operands[0]
    place = reshaped_place(operand.aval.shape, step.results[0].shape, operand.place, step.parts)
    return Decision((WHOLE,), (WHOLE,)) if place is None else Decision((operand.place,), (place,))


def _local_view(step: Step, x: torch.Tensor, shape: Sequence[int], **_: Any) -> torch.Tensor:
    return x.reshape(step.local_result_shape())


VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default)

rule(
    VIEWS,
    Rule(decide=_decide_view, local=_local_view, moves_only=True),
)


# -----------------------------------------------------------------------------
# Dims renamed, added and removed
# -----------------------------------------------------------------------------


def _reordered(names: list[str], order: Sequence[int]) -> str:
    return f"~{' '.join(names)} -> {' '.join(names[index] for index in order) or '()'}"


def _transpose_text(node: fx.Node) -> str:
    names = dim_names(_ndim(node))
    if not names:
        return "~() -> ()"
    first, second = (index % len(names) for index in node.args[1:3])
    order = list(range(len(names)))
    order[first], order[second] = order[second], order[first]
    return _reordered(names, order)


def _t_text(node: fx.Node) -> str:
    names = dim_names(_ndim(node))
    return _reordered(names, range(len(names))[::-1])


def _permute_text(node: fx.Node) -> str:
    names = dim_names(_ndim(node))
    return _reordered(names, [index % len(names) for index in node.args[1]])


def _unsqueeze_text(node: fx.Node) -> str:
    names = dim_names(_ndim(node))
    where = node.args[1] % (len(names) + 1)
    return f"~{' '.join(names) or '()'} -> {' '.join([*names[:where], '1', *names[where:]])}"


def _squeeze_text(node: fx.Node) -> str:
    shape = _shape(node.args[0])
    dims = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = [dims] if isinstance(dims, int) else dims
    dropped = {dim % len(shape) for dim in dims if shape and shape[dim] == 1}
    left = ["1" if dim in dropped else f"d{dim}" for dim in range(len(shape))]
    right = [name for dim, name in enumerate(left) if dim not in dropped]
    return f"~{' '.join(left) or '()'} -> {' '.join(right) or '()'}"


def _local_squeeze(step: Step, x: torch.Tensor, dims: Any = None) -> torch.Tensor:
    return x.reshape(step.local_result_shape())


def _expand_text(node: fx.Node) -> str:
    before, after = _shape(node.args[0]), _shape(node)
    extra = len(after) - len(before)
    grown = ["1" if size == 1 and after[extra + dim] != 1 else f"d{dim}" for dim, size in enumerate(before)]
    right = [f"new{dim}" for dim in range(extra)]
    right += [f"new{extra + dim}" if name == "1" else name for dim, name in enumerate(grown)]
    return f"~{' '.join(grown) or '()'} -> {' '.join(right) or '()'}"


def _local_expand(step: Step, x: torch.Tensor, shape: Sequence[int], **_: Any) -> torch.Tensor:
    return x.expand(step.local_result_shape())


rule([aten.transpose.int], Rule(_transpose_text))
rule([aten.t.default], Rule(_t_text))
rule([aten.permute.default], Rule(_permute_text))
rule([aten.unsqueeze.default], Rule(_unsqueeze_text))
rule([aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims], Rule(_squeeze_text, _local_squeeze))
rule([aten.expand.default], Rule(_expand_text, _local_expand))


# -----------------------------------------------------------------------------
# Dims cut and joined: whole along the dim, free along the others
# -----------------------------------------------------------------------------


def whole_along(*dims: int, ndim: int, results: int = 1, marks: str = "~", operands: int = 1) -> str:
    left = [f"d{dim}^" if dim in dims else f"d{dim}" for dim in range(ndim)]
    operand = f"{marks}{' '.join(left) or '()'}"
    right = [f"new{dim}" if dim in dims else f"d{dim}" for dim in range(ndim)]
    return f"{', '.join([operand] * operands)} -> {', '.join([' '.join(right) or '()'] * results)}"


def _dim(node: fx.Node, position: int, default: int = 0) -> int:
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    return dim % max(_ndim(node), 1)


def _slice_text(node: fx.Node) -> str:
    return whole_along(_dim(node, 1), ndim=_ndim(node))


def _cut_place(place: Place, dim: int, extent: int, start: int, length: int) -> Place | None:
    """Where `length` elements from `start` of a dim lie, when they are whole blocks outside the ranks' factor.

    A fused `"embed (3 heads/tensor)"` is cut into its three parts this way, without moving anything.
    """
    if not isinstance(place, Shard) or place.dim != dim:
        return None
    block = extent // place.outer
    aligned = start % block == 0 and length % block == 0 and length > 0
    return Shard(dim, length // block) if aligned else None


def _decide_slice(step: Step) -> Decision | None:
    dim, (start, end, stride) = _dim(step.node, 1), _bounds(step.node)
    operand = step.operands[0]
    place = _cut_place(operand.place, dim, operand.aval.shape[dim], start, end - start) if stride == 1 else None
    return None if place is None else Decision((operand.place,), (place,))


def _local_slice(step: Step, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    dim, (start, end, stride) = _dim(step.node, 1), _bounds(step.node)
    place = step.decision.operands[0]
    if isinstance(place, Shard) and place.dim == dim:
        start, end = step.parts.local(start), step.parts.local(end)
    return step.run(x, dim, start, end, stride)


def _bounds(node: fx.Node) -> tuple[int, int, int]:
    extent = _shape(node.args[0])[_dim(node, 1)]
    given = [*node.args[2:], *[None] * 3][:3]
    stride = given[2] or 1
    start, end, _ = slice(given[0], given[1], stride).indices(extent)
    return start, max(start, end), stride


def _decide_split(step: Step) -> Decision | None:
    dim, operand = _dim(step.node, 2), step.operands[0]
    places, start = [], 0
    for result in step.results:
        places.append(_cut_place(operand.place, dim, operand.aval.shape[dim], start, result.shape[dim]))
        start += result.shape[dim]
    if any(place is None for place in places):
        return None
    return Decision((operand.place,), tuple(place for place in places if place is not None))


def _local_split(step: Step, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    dim = _dim(step.node, 2)
    lengths = [step.local_result_shape(index)[dim] for index in range(len(step.results))]
    return step.emit(aten.split_with_sizes.default, (x, lengths, dim), {})


def _split_text(node: fx.Node) -> str:
    return whole_along(_dim(node, 2), ndim=_ndim(node), results=len(node.meta["val"]))


def _removed_dim_text(position: int, results: bool) -> Any:
    def text(node: fx.Node) -> str:
        dim, ndim = _dim(node, position), _ndim(node)
        names = [f"d{index}^" if index == dim else f"d{index}" for index in range(ndim)]
        rest = " ".join(f"d{index}" for index in range(ndim) if index != dim) or "()"
        return f"~{' '.join(names)} -> {', '.join([rest] * (len(node.meta['val']) if results else 1))}"

    return text


def _cat_text(node: fx.Node) -> str:
    parts = tensor_operands(node)
    ndim = len(_shape(node))
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % ndim
    left = []
    for index in range(len(parts)):
        left.append("&" + " ".join(f"c{index}^" if d == dim else f"d{d}" for d in range(ndim)))
    return f"{', '.join(left)} -> {' '.join('new' if d == dim else f'd{d}' for d in range(ndim))}"


def _stack_text(node: fx.Node) -> str:
    parts = tensor_operands(node)
    ndim = len(_shape(node))
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % ndim
    names = dim_names(ndim - 1)
    left = ", ".join(["&" + (" ".join(names) or "()")] * len(parts))
    return f"{left} -> {' '.join([*names[:dim], 'new', *names[dim:]])}"


def _dims_text(marks: str = "~") -> Any:
    """Ops whose second argument lists dims that must be whole (flip, roll)."""

    def text(node: fx.Node) -> str:
        ndim = _ndim(node)
        given = node.args[2] if node.target is aten.roll.default and len(node.args) > 2 else node.args[1]
        dims = (
            [dim % ndim for dim in given] if node.target is not aten.roll.default or len(node.args) > 2 else range(ndim)
        )
        return whole_along(*dims, ndim=ndim, marks=marks)

    return text


def _pad_text(node: fx.Node) -> str:
    ndim, pads = _ndim(node), node.args[1]
    padded = [ndim - 1 - index // 2 for index, amount in enumerate(pads) if amount]
    value = node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
    return whole_along(*padded, ndim=ndim, marks="~" if not value else "")


def _last_two_text(node: fx.Node) -> str:
    ndim = _ndim(node)
    return whole_along(ndim - 2, ndim - 1, ndim=ndim)


def _repeat_text(node: fx.Node) -> str:
    ndim, counts = _ndim(node), list(node.args[1])
    extra = len(counts) - ndim
    left = [f"d{dim}" if counts[extra + dim] == 1 else f"d{dim}^" for dim in range(ndim)]
    right = [f"new{dim}" for dim in range(extra)]
    right += [f"d{dim}" if counts[extra + dim] == 1 else f"new{extra + dim}" for dim in range(ndim)]
    return f"~{' '.join(left) or '()'} -> {' '.join(right) or '()'}"


def _scatter_slice_text(node: fx.Node) -> str:
    """`slice_scatter(x, part, dim)`: both lie alike, whole along the dim."""
    dim = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % _ndim(node)
    names = [f"d{index}" for index in range(_ndim(node))]
    left = " ".join(f"{name}^" if index == dim else name for index, name in enumerate(names))
    part = " ".join("part^" if index == dim else name for index, name in enumerate(names))
    return f"&{left}, &{part} -> {' '.join('new' if index == dim else name for index, name in enumerate(names))}"


def _scatter_selection_text(node: fx.Node) -> str:
    """`select_scatter(x, part, dim, index)`: alike in all other dims, whole along that one."""
    dim = node.args[2] % _ndim(node)
    names = [f"d{index}" for index in range(_ndim(node))]
    left = " ".join(f"{name}^" if index == dim else name for index, name in enumerate(names))
    part = " ".join(name for index, name in enumerate(names) if index != dim)
    return (
        f"&{left}, &{part or '()'} -> {' '.join('new' if index == dim else name for index, name in enumerate(names))}"
    )


def _unfold_text(node: fx.Node) -> str:
    """`unfold(x, dim, size, step)`: windows along a dim, their elements in a new last one."""
    return f"{whole_along(_dim(node, 1), ndim=_ndim(node))} newsize"


def _diagonal_dims(node: fx.Node) -> tuple[int, int]:
    given = named_arguments(node.target, node.args, node.kwargs)
    return given.get("dim1", 0) % _ndim(node), given.get("dim2", 1) % _ndim(node)


def _diagonal_text(node: fx.Node) -> str:
    whole = _diagonal_dims(node)
    left = [f"d{dim}^" if dim in whole else f"d{dim}" for dim in range(_ndim(node))]
    return f"~{' '.join(left)} -> {' '.join([f'd{dim}' for dim in range(_ndim(node)) if dim not in whole] + ['new'])}"


def _scatter_diagonal_text(node: fx.Node) -> str:
    """`diagonal_scatter(x, part, offset, dim1, dim2)`: both lie alike, whole along the two dims and the diagonal."""
    whole = _diagonal_dims(node)
    left = [f"d{dim}^" if dim in whole else f"d{dim}" for dim in range(_ndim(node))]
    part = [f"d{dim}" for dim in range(_ndim(node)) if dim not in whole]
    right = [f"new{dim}" if dim in whole else f"d{dim}" for dim in range(_ndim(node))]
    return f"&{' '.join(left)}, &{' '.join([*part, 'part^'])} -> {' '.join(right)}"


rule([aten.slice.Tensor], Rule(_slice_text, _local_slice, _decide_slice))
rule([aten.constant_pad_nd.default], Rule(_pad_text))
rule([aten.select.int], Rule(_removed_dim_text(1, False)))
rule([aten.unbind.int], Rule(_removed_dim_text(1, True)))
rule(
    [aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor],
    Rule(_split_text, _local_split, _decide_split),
)
rule([aten.cat.default], Rule(_cat_text))
rule([aten.stack.default], Rule(_stack_text))
rule([aten.flip.default, aten.roll.default], Rule(_dims_text()))
rule([aten.tril.default, aten.triu.default], Rule(_last_two_text))
rule([aten.repeat.default], Rule(_repeat_text))
rule([aten.slice_scatter.default], Rule(_scatter_slice_text))
rule([aten.select_scatter.default], Rule(_scatter_selection_text))
rule([aten.unfold.default], Rule(_unfold_text))
rule([aten.diagonal.default], Rule(_diagonal_text))
rule([aten.diagonal_scatter.default], Rule(_scatter_diagonal_text))
rule([aten.diag_embed.default], Rule(batched_text(1, linear="~")))
rule([aten.trace.default], Rule("~a^ b^ -> ()"))
rule([aten.view_as_real.default], Rule(batched_text(0, linear="~")))
rule([aten.view_as_complex.default], Rule(batched_text(1, linear="~")))
