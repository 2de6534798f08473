"""Rules of ops that act on each index of the leading dims separately, which may then be sharded.

Examples are images of a batch, and stacks of matrices.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ...ir import info, tensor_operands
from ..texts import pattern

__all__ = ["all_whole_text", "batched_text"]


def batched_text(*trailing: int, linear: str = "") -> Callable[[fx.Node], str]:
    """Return a rule in which the leading dims broadcast, may be sharded, and pass to all results.

    The last dims, `trailing` of each operand, are replicated. The last number is repeated for additional operands.
    `linear` has a mark per operand, `.` for none.
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
    """Write a rule in which no dim may be sharded."""
    return batched_text(*(len(info(operand).aval.shape) for operand in tensor_operands(node)))(node)


def _aligned(batch: tuple[int, ...], batches: list[tuple[int, ...]]) -> list[str]:
    """Names of batch dims, counted from the last. A dim that broadcasts is `1`."""
    names = []
    for position, size in enumerate(reversed(batch)):
        others = [other[-1 - position] for other in batches if len(other) > position]
        names.append("1" if size == 1 and max(others) > 1 else f"b{position}")
    return names[::-1]


def _pattern(batch: list[str], count: int, prefix: str, mark: str = "") -> str:
    return pattern([*batch, *(f"{prefix}{index}{mark}" for index in range(count))])
