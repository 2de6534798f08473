"""What texts of rules are written with where they depend on an op's arguments: how many dims there are, and which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import fx

from ..ir import argument, info, tensor_operands

__all__ = [
    "along_text",
    "dim_names",
    "dim_of",
    "linear_text",
    "ndim_of",
    "pattern",
    "pointwise_text",
    "results_of",
    "whole_along",
]


# -----------------------------------------------------------------------------
# Dims of an operand or a result
# -----------------------------------------------------------------------------


def dim_names(ndim: int, other: Mapping[int, str] | None = None) -> list[str]:
    """A name per dim, of which some have others; a dim without a name is not there.

    >>> pattern(dim_names(3)), pattern(dim_names(3, {0: "d0^", 2: ""}))
    ('d0 d1 d2', 'd0^ d1')
    """
    return [(other or {}).get(dim, f"d{dim}") for dim in range(ndim)]


def pattern(names: Iterable[str]) -> str:
    """The dims of one operand or result, `()` for a scalar."""
    return " ".join(filter(None, names)) or "()"


def whole_along(*dims: int, ndim: int, results: int = 1, mark: str = "~", operands: int = 1) -> str:
    """A rule by which some dims are whole and all others pass.

    >>> whole_along(1, ndim=2)
    '~d0 d1^ -> d0 new1'

    Args:
        dims: those that are whole.
        ndim: how many there are, in operands and results.
        results, operands: how many there are, all alike.
        mark: of every operand.
    """
    operand = mark + pattern(dim_names(ndim, {dim: f"d{dim}^" for dim in dims}))
    result = pattern(dim_names(ndim, {dim: f"new{dim}" for dim in dims}))
    return f"{', '.join([operand] * operands)} -> {', '.join([result] * results)}"


def along_text(mark: str = "") -> Callable[[fx.Node], str]:
    """The rule of an op that works along the dim it names: whole there, and of any length in the results.

    Args:
        mark: of the operand, `"~"` where the op is linear.
    """

    def text(node: fx.Node) -> str:
        return whole_along(dim_of(node), ndim=ndim_of(node), results=results_of(node), mark=mark)

    return text


# -----------------------------------------------------------------------------
# What an op takes and gives
# -----------------------------------------------------------------------------


def ndim_of(node: fx.Node) -> int:
    """How many dims an op's first operand has."""
    return len(info(node.args[0]).aval.shape)  # type: ignore[union-attr]


def dim_of(node: fx.Node) -> int:
    """The dim of its first operand that an op names."""
    return int(argument(node, "dim")) % max(ndim_of(node), 1)


def results_of(node: fx.Node) -> int:
    """How many results an op has."""
    value = info(node).val
    return len(value) if isinstance(value, tuple) else 1


# -----------------------------------------------------------------------------
# Elementwise ops of any number of operands
# -----------------------------------------------------------------------------


def pointwise_text(node: fx.Node) -> str:
    return ", ".join(["..."] * len(tensor_operands(node))) + " -> " + ", ".join(["..."] * results_of(node))


def linear_text(marks: str) -> Callable[[fx.Node], str]:
    """An elementwise rule with one mark per operand, `"&&"` for a sum; `.` is no mark, a lone `&` a scale."""

    def text(node: fx.Node) -> str:
        count = len(tensor_operands(node))
        chosen = marks[:count] if len(marks) >= count else marks + marks[-1] * (count - len(marks))
        return ", ".join(f"{mark.replace('.', '')}..." for mark in chosen) + " -> ..."

    return text
