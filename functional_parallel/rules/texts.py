"""Helpers that write the text of a rule that depends on the arguments of an op, such as its dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import fx

from ..ir import argument, info, tensor_operands

# --- Dims of an operand or a result ---


def dim_names(ndim: int, other: Mapping[int, str] | None = None) -> list[str]:
    """Return a name per dim, `other` overriding the defaults; a dim with the name "" is omitted by `pattern`.

    >>> pattern(dim_names(3)), pattern(dim_names(3, {0: "d0^", 2: ""}))
    ('d0 d1 d2', 'd0^ d1')
    """
    return [(other or {}).get(dim, f"d{dim}") for dim in range(ndim)]


def pattern(names: Iterable[str]) -> str:
    """Join the dim names of one operand or result; `()` for a scalar."""
    return " ".join(filter(None, names)) or "()"


def whole_along(*dims: int, ndim: int, results: int = 1, mark: str = "~", operands: int = 1) -> str:
    """Write a rule where some dims must be replicated and all others may be sharded.

    >>> whole_along(1, ndim=2)
    '~d0 d1^ -> d0 new1'
    """
    operand = mark + pattern(dim_names(ndim, {dim: f"d{dim}^" for dim in dims}))
    result = pattern(dim_names(ndim, {dim: f"new{dim}" for dim in dims}))
    return f"{', '.join([operand] * operands)} -> {', '.join([result] * results)}"


def along_text(mark: str = "") -> Callable[[fx.Node], str]:
    """Return the rule of an op along its `dim` argument: replicated there, and of any size in the results."""

    def text(node: fx.Node) -> str:
        return whole_along(dim_of(node), ndim=ndim_of(node), results=results_of(node), mark=mark)

    return text


# --- Operands and results of an op ---


def ndim_of(node: fx.Node) -> int:
    return len(info(node.args[0]).aval.shape)


def dim_of(node: fx.Node) -> int:
    return int(argument(node, "dim")) % max(ndim_of(node), 1)


def results_of(node: fx.Node) -> int:
    value = info(node).val
    return len(value) if isinstance(value, tuple) else 1


# --- Elementwise ops of any number of operands ---


def pointwise_text(node: fx.Node) -> str:
    return ", ".join(["..."] * len(tensor_operands(node))) + " -> " + ", ".join(["..."] * results_of(node))


def linear_text(marks: str) -> Callable[[fx.Node], str]:
    # `.` means no mark; a single `&` is for a scale. The last mark is repeated for additional operands.

    def text(node: fx.Node) -> str:
        count = len(tensor_operands(node))
        chosen = marks[:count] if len(marks) >= count else marks + marks[-1] * (count - len(marks))
        return ", ".join(f"{mark.replace('.', '')}..." for mark in chosen) + " -> ..."

    return text


# --- Ops on each index of the leading dims separately, such as images of a batch and stacks of matrices ---


def batched_text(*trailing: int, linear: str = "") -> Callable[[fx.Node], str]:
    """Return a rule: leading dims broadcast and may be sharded; the last `trailing` dims are replicated."""

    def text(node: fx.Node) -> str:
        shapes = [info(operand).aval.shape for operand in tensor_operands(node)]
        counts = [*trailing, *[trailing[-1]] * len(shapes)][: len(shapes)]
        marks = [mark.replace(".", "") for mark in linear.ljust(len(shapes), ".")]
        batches = [shape[: len(shape) - count] for shape, count in zip(shapes, counts, strict=True)]
        largest = max(batches, key=len)
        operands = [
            mark + _batched_pattern(_aligned(batch, batches), len(shape) - len(batch), f"o{index}x", "^")
            for index, (mark, batch, shape) in enumerate(zip(marks, batches, shapes, strict=True))
        ]
        results = [
            _batched_pattern(_aligned(largest, [largest]), len(result.shape) - len(largest), f"new{index}x")
            for index, result in enumerate(info(node).avals)
        ]
        return f"{', '.join(operands)} -> {', '.join(results)}"

    return text


def all_whole_text(node: fx.Node) -> str:
    return batched_text(*(len(info(operand).aval.shape) for operand in tensor_operands(node)))(node)


def _aligned(batch: tuple[int, ...], batches: list[tuple[int, ...]]) -> list[str]:
    """Names of batch dims, counted from the last. A dim that broadcasts is `1`."""
    names = []
    for position, size in enumerate(reversed(batch)):
        others = [other[-1 - position] for other in batches if len(other) > position]
        names.append("1" if size == 1 and max(others) > 1 else f"b{position}")
    return names[::-1]


def _batched_pattern(batch: list[str], count: int, prefix: str, mark: str = "") -> str:
    return pattern([*batch, *(f"{prefix}{index}{mark}" for index in range(count))])
