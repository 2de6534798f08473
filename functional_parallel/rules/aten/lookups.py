"""Rules of ops that select along a dim. If it is sharded, each rank looks up its shard and leaves partial sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ...errors import TracingError
from ...ir import current_source, info, tensor_operands
from ...tracing import Replaced, intercept
from ..axis_layout import REPLICATED, Shard
from ..convert import convert
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import all_whole_text, dim_names, dim_of, ndim_of, pattern

aten = torch.ops.aten

# --- Embedding ---


def _local_embedding(
    step: OpContext, table: Tensor, index: Tensor, padding: int = -1, by_frequency: bool = False, *args: bool
) -> Tensor:
    if step.splits("v"):
        rows = _held_rows(step, table, index, padding)
    elif by_frequency and isinstance(step.decision.operands[1], Shard):
        rows = step.run(table, index, padding)
    else:
        return step.run(table, index, padding, by_frequency, *args)
    return _by_frequency(step, rows, index) if by_frequency else rows


def _held_rows(step: OpContext, table: Tensor, index: Tensor, padding: int) -> Tensor:
    held, inside = step.held_positions(index)
    rows = aten.embedding.default(table, held)
    if padding >= 0:  # the padding row is looked up but never trained
        rows = torch.where((index == padding).unsqueeze(-1), rows.detach(), rows)
    return torch.where(inside.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))


def _by_frequency(step: OpContext, rows: Tensor, index: Tensor) -> Tensor:
    everywhere = convert(index, step.decision.operands[1], REPLICATED, step.axis, step.parts).flatten()
    none = torch.zeros(step.operands[0].aval.shape[0], dtype=torch.int64, device=index.device)
    counts = none.scatter_add(0, everywhere.long(), torch.ones_like(everywhere, dtype=torch.int64))
    difference = torch.where(rows.isfinite(), rows - rows.detach(), 0)  # its value is zero, but it has the derivative
    return rows.detach() + difference / counts[index].unsqueeze(-1)


rule([aten.embedding.default], Rule("~v? d, ... -> ... d", _local_embedding))


@intercept(torch.nn.functional.embedding, always=True)
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Replaced:
    """Compute a sparse embedding with a dense gradient, which has the same values."""
    # `max_norm` modifies the table.
    if max_norm is not None:
        raise TracingError(
            f"{current_source()}: embedding(max_norm={max_norm}) changes the table in place. Rescale its rows in the "
            "optimizer's update, or in the loss by table * (max_norm / table.norm(dim=-1, keepdim=True)).clamp(max=1)"
        )
    if not sparse:
        return NotImplemented
    return torch.nn.functional.embedding(input, weight, padding_idx, None, norm_type, scale_grad_by_freq)


# --- gather and index_select ---


def _gather_text(node: fx.Node) -> str:
    # `gather` also allows a shorter index; such a dim must be replicated.
    x, index = info(node.args[0]).aval.shape, info(node.args[2]).aval.shape
    if len(x) != len(index):  # a scalar, or an index without elements
        return all_whole_text(node)
    shorter = [dim for dim in range(len(x)) if x[dim] != index[dim]]
    left = {dim: f"d{dim}^" for dim in shorter} | {dim_of(node): "picked?"}
    right = {dim: f"shorter{dim}^" for dim in shorter} | {dim_of(node): "slots"}
    slots = pattern(dim_names(len(x), right))
    return f"~{pattern(dim_names(len(x), left))}, {slots} -> {slots.replace('^', '')}"


def _local_gather(step: OpContext, x: Tensor, dim: int, index: Tensor, **kwargs: bool) -> Tensor:
    if not step.splits("picked"):
        return step.run(x, dim, index, **kwargs)
    held, inside = step.held_positions(index)
    return torch.where(inside, x.gather(dim, held), torch.zeros((), dtype=x.dtype, device=x.device))


def _index_select_text(node: fx.Node) -> str:
    ndim, dim = ndim_of(node), dim_of(node)
    if not ndim or not info(node.args[2]).aval.shape:
        return all_whole_text(node)
    return f"~{pattern(dim_names(ndim, {dim: 'picked?'}))}, slots -> {pattern(dim_names(ndim, {dim: 'slots'}))}"


def _local_index_select(step: OpContext, x: Tensor, dim: int, index: Tensor) -> Tensor:
    if not step.splits("picked"):
        return step.run(x, dim, index)
    held, inside = step.held_positions(index)
    rows = x.index_select(dim, held)
    shape = [-1 if d == dim % x.ndim else 1 for d in range(x.ndim)]
    return torch.where(inside.reshape(shape), rows, torch.zeros((), dtype=x.dtype, device=x.device))


rule([aten.gather.default], Rule(_gather_text, _local_gather))
rule([aten.index_select.default], Rule(_index_select_text, _local_index_select))


# --- Advanced indexing, scatters ---


def _index_text(node: fx.Node) -> str:
    names = _indexing_names(node)
    if names is None:
        return all_whole_text(node)
    x, indices, result = names
    return f"~{pattern(x)}, {', '.join(map(pattern, indices))} -> {pattern(result)}"


def _put_text(node: fx.Node) -> str:
    names = _indexing_names(node, "^")
    if names is None:
        return _replicated_text(node)
    x, indices, written = names
    *others, shape = (info(operand).aval.shape for operand in tensor_operands(node))
    sizes: dict[str, int] = {}
    for names_of_dims, full in zip([x, *indices], others, strict=True):
        sizes.update(zip(names_of_dims, full, strict=True))
    aligned = zip(written[len(written) - len(shape) :], shape, strict=True)
    values = ["1" if size == 1 != sizes[name] else name for name, size in aligned]
    operands = _both_linear([pattern(x), *map(pattern, indices), pattern(values)])
    result = [name.replace("d", "new") if name.endswith("^") else name for name in x]
    return f"{', '.join(operands)} -> {pattern(result)}"


def _indexing_names(node: fx.Node, mark: str = "") -> tuple[list[str], list[list[str]], list[str]] | None:
    """Names of the dims of x, of each index (`mark`: if it enumerates none), and of `x[indices]`. None for masks."""
    avals = {dim: info(index).aval for dim, index in enumerate(node.args[1]) if index is not None}
    if any(aval.dtype == torch.bool for aval in avals.values()):
        return None
    shared = torch.broadcast_shapes(*(aval.shape for aval in avals.values()))
    paired = dict(info(node).enumerated)
    names = [f"p{k}" if k in paired.values() else f"i{k}{mark}" for k in range(len(shared))]
    indices = [
        [
            "1" if size == 1 != shared[k] else names[k]
            for k, size in enumerate(aval.shape, len(shared) - len(aval.shape))
        ]
        for aval in avals.values()
    ]
    ndim = ndim_of(node)
    x = dim_names(ndim, {dim: f"p{paired[dim]}" if dim in paired else f"d{dim}^" for dim in avals})
    kept = [name for dim, name in enumerate(x) if dim not in avals]
    first, last = min(avals), max(avals)
    ahead = first if last - first == len(avals) - 1 else 0  # the dims of adjacent indices stay in place
    return x, indices, [*kept[:ahead], *names, *kept[ahead:]]


def _local_indexing(step: OpContext, x: Tensor, indices: list[Any], *args: Argument, **kwargs: Argument) -> Tensor:
    """Run the op on a shard. An index that enumerates the sharded dim then enumerates the shard."""
    for dim, k in info(step.node).enumerated:
        if step.splits(f"p{k}"):
            index, ndim = indices[dim], max(index.ndim for index in indices if index is not None)
            shape = [1] * index.ndim
            shape[k - ndim] = x.shape[dim]
            own = torch.arange(x.shape[dim], device=index.device).reshape(shape).expand(index.shape)
            indices = [*indices[:dim], own, *indices[dim + 1 :]]
    return step.run(x, indices, *args, **kwargs)


def _scatter_text(node: fx.Node) -> str:
    # Another dim may be sharded if its size is the same in every operand.
    shapes = [info(operand).aval.shape for operand in tensor_operands(node)]
    ndim = len(shapes[0])
    whole = [dim for dim in range(ndim) if dim == dim_of(node) or len({shape[dim] for shape in shapes}) > 1]
    patterns = [pattern(dim_names(ndim, {d: f"o{position}x{d}^" for d in whole})) for position in range(len(shapes))]
    with_source = len(patterns) == 3
    result = pattern(dim_names(ndim, {dim: f"new{dim}" for dim in whole}))
    return f"{', '.join(_both_linear(patterns) if with_source else patterns)} -> {result}"


def _replicated_text(node: fx.Node) -> str:
    operands, _, result = all_whole_text(node).partition(" -> ")
    return f"{', '.join(_both_linear(operands.split(', ')))} -> {result}"


def _both_linear(patterns: list[str]) -> list[str]:
    return [f"&{patterns[0]}", *patterns[1:-1], f"&{patterns[-1]}"]


def _without_marks(text: Callable[[fx.Node], str]) -> Callable[[fx.Node], str]:
    return lambda node: text(node).replace("&", "")


def _rows_text(node: fx.Node) -> str:
    ndim, dim = ndim_of(node), dim_of(node)
    if not ndim or len(info(node.args[3]).aval.shape) != ndim:
        return _replicated_text(node)
    x, source, result = (pattern(dim_names(ndim, {dim: name})) for name in ("row^", "part^", "new"))
    return f"&{x}, i^, &{source} -> {result}"


rule([aten.index.Tensor], Rule(_index_text, _local_indexing))
rule([aten.index_put.default], Rule(_put_text, _local_indexing))
rule([aten.scatter.value, aten.scatter.src, aten.scatter_add.default], Rule(_scatter_text))
rule([aten.scatter_reduce.two], Rule(_without_marks(_scatter_text)))
rule([aten.index_add.default, aten.index_copy.default], Rule(_rows_text))
rule([aten.index_reduce.default], Rule(_without_marks(_rows_text)))


# --- Bags of rows ---


@intercept(torch.nn.functional.embedding_bag, always=True)
def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Look up rows and reduce them by separate ops, because the fused kernel has no derivative in a trace."""
    if input.ndim != 2 or offsets is not None or max_norm is not None or scale_grad_by_freq:
        raise TracingError(
            f"{current_source()}: embedding_bag is traced for bags of one length alone, a matrix of indices without "
            "offsets, max_norm and scale_grad_by_freq; write it with F.embedding and a sum"
        )
    rows = torch.nn.functional.embedding(input, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is not None:
        return _without_padding(rows, (input != padding_idx % len(weight)).unsqueeze(-1), mode)
    return rows.max(1).values if mode == "max" else getattr(rows, mode)(1)


def _without_padding(rows: Tensor, counts: Tensor, mode: str) -> Tensor:
    if mode == "max":
        largest = rows.masked_fill(~counts, -math.inf).max(1).values
        return torch.where(counts.any(1), largest, 0)
    total = torch.where(counts, rows, 0).sum(1)
    return total / counts.sum(1).clamp(min=1) if mode == "mean" else total
