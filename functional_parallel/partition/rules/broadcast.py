"""Rules of elementwise ops, written from the number of tensor operands."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from ...tracing.graph import walk_args

__all__ = ["dim_names", "linear_text", "pointwise_text", "tensor_operands"]


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The node's tensor operands in order of appearance, each occurrence counted."""
    found: list[fx.Node] = []
    walk_args((node.args, node.kwargs), lambda value: found.append(value) if isinstance(value, fx.Node) else None)
    return found


def pointwise_text(node: fx.Node) -> str:
    results = node.meta["val"]
    count = len(results) if isinstance(results, tuple) else 1  # `frexp` has two
    return ", ".join(["..."] * len(tensor_operands(node))) + " -> " + ", ".join(["..."] * count)


def linear_text(marks: str) -> Callable[[fx.Node], str]:
    """An elementwise rule with one mark per operand, `"&&"` for a sum; `.` is no mark, a lone `&` a scale."""

    def text(node: fx.Node) -> str:
        count = len(tensor_operands(node))
        chosen = marks[:count] if len(marks) >= count else marks + marks[-1] * (count - len(marks))
        return ", ".join(f"{mark.replace('.', '')}..." for mark in chosen) + " -> ..."

    return text


def dim_names(ndim: int, prefix: str = "d") -> list[str]:
    """`d0 d1 d2 …`, one factor name per dim."""
    return [f"{prefix}{index}" for index in range(ndim)]
