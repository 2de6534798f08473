"""A traced function under torch.func: what it closes over of the transform is refused, what it is given is right.

The levels of transforms around a trace are set aside; what they wrap was taken for a constant, and derivatives were
zero, or those of an inner level.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import TracingError
from sharding_specs import Mesh, P

MESH = Mesh(i=2)
W = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) % 5 - 2

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cubes(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ((x @ a) ** 3).sum()


TRANSFORMS: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]] = {
    "grad": lambda f: torch.func.grad(f)(W),
    "jvp": lambda f: torch.func.jvp(f, (W,), (W + 1,))[1],
    "fp.jvp": lambda f: fp.jvp(f, (W,), (W + 1,))[1],
    "vmap": lambda f: torch.func.vmap(f)(torch.stack([W, W + 1])),
    "fp.vmap": lambda f: fp.vmap(f)(torch.stack([W, W + 1])),
    "hessian": lambda f: torch.func.hessian(f)(W),
}


def body(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return fp.psum(cubes(a, x), "i")


def in_list(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    holder = {"a": [a]}
    return fp.shard_map(lambda x: fp.psum((x * torch.stack(holder["a"])).sum(), "i"), MESH, P("i"), P())(x)


def in_a_global(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    global shared
    shared = a
    return fp.shard_map(lambda x: body(shared, x), MESH, P("i"), P())(x)


HELD: list[torch.Tensor] = []
SETTINGS = ModuleType("settings")
SETTINGS.__file__ = __file__


def first_held(x: torch.Tensor) -> torch.Tensor:
    return body(HELD[0], x)


def in_a_global_list(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    HELD[:] = [a]
    return fp.shard_map(lambda x: body(HELD[0], x), MESH, P("i"), P())(x)


def in_a_helpers_global(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    HELD[:] = [a]
    return fp.shard_map(lambda x: first_held(x), MESH, P("i"), P())(x)


def in_a_function_inside(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    HELD[:] = [a]
    return fp.shard_map(lambda x: (lambda y: body(HELD[0], y))(x), MESH, P("i"), P())(x)


def in_a_module(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    SETTINGS.weights = {"a": a}  # type: ignore[attr-defined]
    return fp.shard_map(lambda x: body(SETTINGS.weights["a"], x), MESH, P("i"), P())(x)


CLOSING: dict[str, Function] = {
    "shard_map": lambda a, x: fp.shard_map(lambda x: body(a, x), MESH, P("i"), P())(x),
    "a plan": lambda a, x: fp.compile(fp.data_parallel("i")(lambda w, x: cubes(a * w, x)), MESH)(W, x),
    "in a list": in_list,
    "in a global": in_a_global,
    "in a global list": in_a_global_list,
    "in a helper's global": in_a_helpers_global,
    "in a function inside": in_a_function_inside,
    "in a module": in_a_module,
}
GIVEN: dict[str, Function] = {
    "shard_map": lambda a, x: fp.shard_map(body, MESH, (P(), P("i")), P())(a, x),
    "a plan": lambda a, x: fp.compile(fp.data_parallel("i")(cubes), MESH)(a, x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", CLOSING)
def test_what_is_closed_over_is_refused(name: str, transform: str) -> None:
    with pytest.raises(TracingError, match=r"test_enclosing.*closes over a tensor.*\(3,\).*pass it as an argument"):
        TRANSFORMS[transform](lambda a: CLOSING[name](a, X))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_given_is_differentiated(name: str, transform: str) -> None:
    found = TRANSFORMS[transform](lambda a: GIVEN[name](a, X))
    torch.testing.assert_close(found, TRANSFORMS[transform](lambda a: cubes(a, X)), rtol=0, atol=0)


INNER = {name: transform for name, transform in TRANSFORMS.items() if name != "hessian"}


@pytest.mark.parametrize("transform", INNER)
def test_derivatives_in_a_body(transform: str) -> None:
    """`fp.grad` traces there: closing over a level of torch.func's is refused, an argument is not."""

    def mixed(a: torch.Tensor, x: torch.Tensor, grad: Any, closed: bool) -> torch.Tensor:
        inner = lambda u, a: (u * a).sum() ** 3  # noqa: E731
        of_one = grad(lambda u: inner(u, a)) if closed else grad(inner)
        return (of_one(x[0]) if closed else of_one(x[0], a)).sum()

    def on_a_rank(closed: bool) -> Any:
        f = lambda x: INNER[transform](lambda a: mixed(a, x, fp.grad, closed))  # noqa: E731
        return fp.shard_map(f, MESH, P(), P())(X)

    wanted = INNER[transform](lambda a: mixed(a, X, torch.func.grad, True))
    torch.testing.assert_close(on_a_rank(False), wanted, rtol=0, atol=0)
    if transform.startswith("fp."):  # these trace their function, so that no level encloses what it closes over
        torch.testing.assert_close(on_a_rank(True), wanted, rtol=0, atol=0)
        return
    with pytest.raises(TracingError, match="pass it as an argument"):
        on_a_rank(True)


def test_a_program_first_run_in_a_transform_is_run_in_another() -> None:
    """What it keeps, such as the numbers of ranks, belongs to no level."""
    numbered = fp.shard_map(lambda x: fp.psum((x**3).sum() * (1 + fp.axis_index("i")), "i"), MESH, P("i"), P())
    gradient = torch.func.grad(numbered)
    torch.func.jvp(gradient, (W.repeat(2),), (W.repeat(2),))
    rows = torch.stack([W.repeat(2), W.repeat(2) + 1])
    wanted = 3 * rows**2 * torch.tensor([1.0, 1, 1, 2, 2, 2], dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(gradient)(rows), wanted, rtol=0, atol=0)
