"""Each private torch API in `functional_parallel/_torch/functions.py` does what the library relies on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch

from functional_parallel import _torch

Look = Callable[[], None]


@pytest.fixture(autouse=True, params=["as torch has it", "by forwards"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.14 `apply` has a frame; what is done since then is tested there too."""
    if request.param == "by forwards":
        monkeypatch.setattr("functional_parallel._torch.functions._APPLY", None)


def running(call: Callable[[Look], Any]) -> list[type]:
    """What is seen where `call` looks."""
    seen: list[list[type]] = []

    def since() -> None:
        call(lambda: seen.append(_torch.running_functions(since.__code__)))

    since()
    (found,) = seen
    return found


def function(forward: Any) -> Any:
    """An autograd.Function of (tensor, look)."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
            return cotangent * 2, None

    Doubled.forward = staticmethod(forward)  # type: ignore[assignment]
    return Doubled


def doubled(x: torch.Tensor, look: Look) -> torch.Tensor:
    look()
    return x * 2


def plain(x: torch.Tensor, look: Look) -> torch.Tensor:
    return doubled(x, look)


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapper(*args: Any) -> Any:
        return forward(*args)

    return wrapper


def scaled(factor: int) -> Callable[..., Any]:
    def forward(x: torch.Tensor, look: Look) -> torch.Tensor:
        look()
        return x * factor

    return forward


class Called:
    def __call__(self, x: torch.Tensor, look: Look) -> torch.Tensor:
        return doubled(x, look)


FORWARDS = {
    "function": plain,
    "decorated": decorated(lambda x, look: doubled(x, look)),
    "partial": partial(lambda factor, x, look: doubled(x * factor, look), 1),
    "object": Called(),
    "closure": scaled(2),
}


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_function_is_seen_whatever_its_forward_is(kind: str) -> None:
    cls, x = function(FORWARDS[kind]), torch.ones(2, requires_grad=True)
    assert running(lambda look: cls.apply(x, look)) == [cls]
    assert running(lambda look: torch.func.grad(lambda x: cls.apply(x, look).sum())(torch.ones(2))) == [cls]


def test_of_one_code_the_function_that_runs_is_seen() -> None:
    functions = [function(scaled(factor)) for factor in range(3)]
    for each in functions:
        assert running(lambda look, each=each: each.apply(torch.ones(2), look)) == [each]


def test_nothing_else_is_seen() -> None:
    """Not what does without gradients, a decorator's own code around others, nor what stands around."""
    with torch.no_grad():
        assert running(lambda look: decorated(lambda: look())()) == []
    seen: list[Any] = []
    outer = function(lambda x, look: seen.append(running(lambda look: look())) or x * 2)
    outer.apply(torch.ones(2), None)
    assert seen == [[]]


def test_one_inside_the_other_is_seen_first() -> None:
    inner = function(plain)
    outer = function(lambda x, look: inner.apply(x, look))
    assert running(lambda look: outer.apply(torch.ones(2), look)) == [inner, outer]
