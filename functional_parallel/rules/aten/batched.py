"""Ops that treat leading dims one by one, as images of a batch or a stack of matrices: those are free."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ...ir import info, tensor_operands
from ..texts import pattern

__all__ = ["all_whole_text", "batched_text"]


def batched_text(*trailing: int, linear: str = "") -> Callable[[fx.Node], str]:
    """A rule by which each operand's last dims are whole, and those before broadcast and pass to all results.

    Args:
        trailing: how many last dims, by operand; of further operands as many as of the last one listed.
        linear: marks by operand, `.` for none.
    """

    def text(node: fx.Node) -> str:
        shapes = [info(operand).aval.shape for operand in tensor_operands(node)]
        counts = [*trailing, *[trailing[-1]] * len(shapes)][: len(shapes)]
        marks = [mark.replace(".", "") for mark in linear.ljust(len(shapes), ".")]
        batches = [shape[: len(shape) - count] for shape, count in zip(shapes, counts, strict=True)]
        largest = max(batches, key=len)
        operands = [
            mark + _pattern(_aligned(batch, batches), len(shape) - len(batch), f"o{index}x", "^")
            for index, (mark, batch, shape) in enumerate(zip(marks, batches, shapes, strict=True))
        ]
        results = [
            _pattern(_aligned(largest, [largest]), len(result.shape) - len(largest), f"new{index}x")
            for index, result in enumerate(info(node).avals)
        ]
        return f"{', '.join(operands)} -> {', '.join(results)}"

    return text


def all_whole_text(node: fx.Node) -> str:
    """A rule by which no dim is free."""
    return batched_text(*(len(info(operand).aval.shape) for operand in tensor_operands(node)))(node)


def _aligned(batch: tuple[int, ...], batches: list[tuple[int, ...]]) -> list[str]:
    """Names of batch dims, counted from the last; one that broadcasts has none."""
    names = []
    for position, size in enumerate(reversed(batch)):
        others = [other[-1 - position] for other in batches if len(other) > position]
        names.append("1" if size == 1 and max(others) > 1 else f"b{position}")
    return names[::-1]


def _pattern(batch: list[str], count: int, prefix: str, mark: str = "") -> str:
    return pattern([*batch, *(f"{prefix}{index}{mark}" for index in range(count))])
