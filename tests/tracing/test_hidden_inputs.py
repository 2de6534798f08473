"""What marked functions reach besides their arguments: where it differs between calls, they are traced."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import aval_of, without_repeats
from functional_parallel.tracing import trace
from sharding_specs import Mesh

from .test_repeated import LAYERS, WIDTH, Loss, Mark, affine, parameters, recorded, require_same_program


class Settings:
    scale = 1.0
    scales: ClassVar[list[float]] = [1.0]

    def __init__(self) -> None:
        self.own = 1.0


class Derived(Settings):
    pass


class Slotted:
    __slots__ = ("scale",)


class SlottedToo(Slotted):
    __slots__ = ("other",)


class Numbers(list[float]):
    scale = 1.0


class Doubling:
    """A callable object whose class reaches a global list."""

    def layer(self, p: Any, x: Tensor) -> Tensor:
        SEEN.append(x)
        return affine(p, x)


SEEN: list[Tensor] = []
SETTINGS, NUMBERS, SLOTTED = Derived(), Numbers(), SlottedToo()


def scaled(read: Callable[[], float], write: Callable[[float], None], fewest: int = 1) -> Loss:
    """A layer that multiplies by a value that the model changes before each call."""

    def loss(mark: Mark, params: Any, x: Tensor) -> Tensor:
        layer = mark(lambda p, x: affine(p, x) * read())
        for number, p in enumerate(params):
            write(1.0 + number // fewest)
            x = layer(p, x)
        return x

    return loss


def attribute_of(owner: Any, name: str = "scale") -> Loss:
    return scaled(lambda: float(getattr(owner, name)), lambda scale: setattr(owner, name, scale))


def _set_first(scale: float) -> None:
    Settings.scales[0] = scale


def of_the_function(mark: Mark, params: Any, x: Tensor) -> Tensor:
    def layer(p: Any, x: Tensor) -> Tensor:
        scale: float = layer.scale  # type: ignore[attr-defined]
        return affine(p, x) * scale

    marked = mark(layer)
    for number, p in enumerate(params):
        layer.scale = 1.0 + number  # type: ignore[attr-defined]
        x = marked(p, x)
    return x


def appended_in_a_method(mark: Mark, params: Any, x: Tensor) -> Tensor:
    SEEN.clear()
    layer = mark(Doubling().layer)
    for p in params:
        x = layer(p, x)
    return x + sum(SEEN)


def activations_in_another_pattern(mark: Mark, params: Any, x: Tensor) -> Tensor:
    """The same two functions, twice one or twice the other."""

    @mark
    def layer(p: Any, x: Tensor, activations: list[Callable[[Tensor], Tensor]]) -> Tensor:
        x = affine(p, x)
        for each in activations:
            x = each(x)
        return x

    for number, p in enumerate(params):
        x = layer(p, x, [torch.sin, torch.cos, torch.sin if number % 2 else torch.cos])
    return x


def dicts_in_another_order(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x, named: affine(p, x) * next(iter(named.values())).sum())
    for number, p in enumerate(params):
        named = {"a": p["w"], "b": p["b"]}
        x = layer(p, x, named if number % 2 else dict(reversed(named.items())))
    return x


def keywords_in_another_order(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x, **named: affine(p, x) * next(iter(named.values())).sum())
    for number, p in enumerate(params):
        x = layer(p, x, a=p["w"], b=p["b"]) if number % 2 else layer(p, x, b=p["b"], a=p["w"])
    return x


def behind_a_reference(mark: Mark, params: Any, x: Tensor) -> Tensor:
    held = Settings()
    reference = weakref.ref(held)
    layer = mark(lambda p, x: affine(p, x) * getattr(reference(), "own"))  # noqa: B009
    for number, p in enumerate(params):
        held.own = 1.0 + number
        x = layer(p, x)
    return x


@functools.lru_cache
def cached() -> list[float]:
    return [1.0]


def _set_cached(scale: float) -> None:
    cached()[0] = scale


def attributes_of_results(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(p: Any, x: Tensor) -> Tensor:
        y = affine(p, x)
        y.aux = y.mean()  # type: ignore[attr-defined]
        return y

    for p in params:
        x = layer(p, x)
        x = x + x.aux  # type: ignore[attr-defined]
    return x


def attributes_of_arguments(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x: affine(p, x) * x.depth)
    for number, p in enumerate(params):
        x = x + 0
        x.depth = number  # type: ignore[attr-defined]
        x = layer(p, x)
    return x


class Box:
    """A node of pytrees with an attribute that is not in the tree."""

    def __init__(self, x: Tensor, scale: float) -> None:
        self.x, self.scale = x, scale


optree.register_pytree_node(
    Box,
    lambda box: ((box.x,), None),
    lambda _, children: Box(next(iter(children)), 1.0),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


def attributes_of_nodes(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, box: affine(p, box.x) * box.scale)
    for number, p in enumerate(params):
        x = layer(p, Box(x, 1.0 + number))
    return x


def negative_zeros(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x, zero: affine(p, x) * torch.copysign(torch.ones_like(x), torch.tensor(zero)))
    for number, p in enumerate(params):
        x = layer(p, x, -0.0 if number % 2 else 0.0)
    return x


def lists_that_are_returned(mark: Mark, params: Any, x: Tensor) -> Tensor:
    """The caller writes into the list that it has passed."""
    layer, states = mark(lambda p, x, states: (affine(p, x), states)), [x]
    for p in params:
        x, found = layer(p, x, states)
        found[0] = x
    return x + states[0]


REACHED: dict[str, tuple[Loss, int]] = {
    each.__name__: (each, runs)
    for each, runs in (
        *((of_the_function, 5), (appended_in_a_method, 5), (activations_in_another_pattern, 4)),
        *((dicts_in_another_order, 4), (keywords_in_another_order, 4), (behind_a_reference, 5)),
        *((attributes_of_results, 5), (attributes_of_arguments, 5)),
        *((attributes_of_nodes, 5), (negative_zeros, 4), (lists_that_are_returned, 5)),
    )
}
REACHED |= {
    f"attribute {name}": (loss, LAYERS)
    for name, loss in {
        "of an object": attribute_of(SETTINGS, "own"),
        "of a base class": scaled(lambda: Derived.scale, lambda scale: setattr(Settings, "scale", scale)),
        "of a class by an object": scaled(lambda: SETTINGS.scale, lambda scale: setattr(Settings, "scale", scale)),
        "in a list of a class": scaled(lambda: Derived.scales[0], _set_first),
        "of a list": attribute_of(NUMBERS),
        "in a slot of a base class": attribute_of(SLOTTED),
        "in a list of a cache": scaled(lambda: cached()[0], _set_cached),
    }.items()
}


@pytest.mark.parametrize("name", REACHED)
def test_what_a_function_reaches_is_compared(name: str) -> None:
    require_same_program(*REACHED[name])


def test_values_of_an_outer_trace_are_read_each_time() -> None:
    args, found = (parameters(), torch.ones(4, WIDTH, dtype=torch.float64)), []

    def outer(x: Tensor) -> list[Tensor]:
        scales = [torch.tensor(1.0 + number) for number in range(LAYERS)]

        def inner(params: Any, x: Tensor) -> Tensor:
            layer = fp.repeated(lambda p, x, scale: affine(p, x) * scale.item())
            for p, scale in zip(params, scales, strict=True):
                x = layer(p, x, scale)
            return x

        found.append(recorded(inner, *args))
        return [x]

    for switch in (nullcontext, without_repeats):
        with switch():
            trace(outer, [aval_of(torch.ones(2))], forward_only=True)
    assert found[0] == found[1] and found[0][1] == LAYERS


class of_module_resnet:  # the name of its module begins as that of a module which is compared by identity
    scale = 1.0


def test_modules_are_told_by_their_whole_name() -> None:
    of_module_resnet.__module__ = "resnet"
    owner = of_module_resnet()
    require_same_program(attribute_of(owner), LAYERS)


# --- Two equal calls with different ops ---


def test_a_hidden_input_is_reported() -> None:
    """A number that nothing reaches by a name: the second call differs from the first one."""
    hidden = iter(range(100))
    sys.modules[f"{__name__}.hidden"] = hidden  # type: ignore[assignment]

    def loss(mark: Mark, params: Any, x: Tensor) -> Tensor:
        layer = mark(lambda p, x: affine(p, x) * next(sys.modules[f"{__name__}.hidden"]))  # type: ignore[call-overload]
        for p in params:
            x = layer(p, x)
        return x

    def model(params: Any, x: Tensor) -> Tensor:
        return loss(fp.repeated, params, x).sum()

    try:
        with pytest.warns(fp.errors.SideEffectWarning, match=r"lambda.*: two equal calls have different ops, first at"):
            lines, runs = recorded(model, parameters(), torch.ones(4, WIDTH, dtype=torch.float64))
    finally:
        del sys.modules[f"{__name__}.hidden"]
    assert runs == LAYERS
    assert [f"{number})" for number in range(LAYERS)] == [
        line.split("  # ")[0].rstrip().split(", ")[-1] for line in lines if "mul" in line
    ]


def test_results_of_kept_tensors_are_kept() -> None:
    """Mixed precision has a list of tensors in full precision, to which it adds results of calls on them alone."""

    def loss(params: Any, x: Tensor) -> Tensor:
        layer = fp.repeated(lambda w, x: (torch.tanh(x @ w), w * 2))
        for number in (1, 2, 4, 1, 0, 3, 0, 3):
            x, doubled = layer(params[number], x)
            x = x @ doubled
        return x.square().mean()

    plan = fp.chain(fp.mixed_precision("bf16", keep=["0", "3"]), fp.data_parallel("data"))
    args = [p["w"] for p in parameters()], torch.ones(4, WIDTH)
    texts = [
        str(fp.compile(fp.grad(plan(loss)), Mesh(data=2), without=without).lower(*args)) for without in ((), "repeats")
    ]
    assert texts[0] == texts[1]
