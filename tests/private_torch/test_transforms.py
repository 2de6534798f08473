"""Each private torch API in `functional_parallel/_torch/transforms.py` does what the library relies on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from functional_parallel import _torch

from ..threads import in_backward_thread
from .count import Count

aten = torch.ops.aten


def test_a_dispatch_mode_sees_ops_below_autograd() -> None:
    with Count() as mode:
        torch.nn.functional.linear(torch.ones(2, 3, requires_grad=True), torch.ones(4, 3))
    assert aten.mm.default in mode.seen and aten.linear.default not in mode.seen


def test_modes_can_be_set_aside() -> None:
    with Count() as mode:
        with _torch.disable_modes():
            torch.ones(2) + 1
        assert mode.seen == []
        assert _torch.dispatch_modes() == [mode]


def test_functions_are_not_seen_where_what_sees_them_is_set_aside() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(func)

    with Seen(), _torch.disable_torch_function():
        assert torch.ones(2).numpy().tolist() == [1, 1]


def test_modes_that_see_functions_are_listed() -> None:
    with BaseTorchFunctionMode() as outer, BaseTorchFunctionMode() as inner:
        assert _torch.function_modes() == [outer, inner]
    assert _torch.function_modes() == []


def test_levels_that_a_trace_sets_aside_count() -> None:
    def needs(x: torch.Tensor, counted: bool) -> torch.Tensor:
        with _torch.counting_levels() if counted else nullcontext(), _torch.disable_functorch():
            found.append(_torch.needs_higher_derivatives())
        return x

    found: list[bool] = []
    for counted in (True, False):
        torch.func.jvp(lambda x, counted=counted: needs(x, counted), (torch.ones(2),), (torch.ones(2),))
    assert found == [True, False]
    assert not _torch.needs_higher_derivatives()


def test_transforms_can_be_set_aside() -> None:
    """Inside, plain tensors are plain even while an enclosing grad is active."""
    found = []

    def f(x: torch.Tensor) -> torch.Tensor:
        assert _torch.differentiating_level() == 1
        with _torch.disable_functorch():
            found.append((_torch.differentiating_level(), _torch.is_functorch_wrapped(torch.ones(2) * 2)))
        assert _torch.differentiating_level() == 1
        return (x * x).sum()

    assert torch.equal(torch.func.grad(f)(torch.ones(2)), torch.full((2,), 2.0))
    assert found == [(0, False)]


def test_mapped_dims_of_the_plain_tensor() -> None:
    """The innermost level first; what an inner level took away an outer one does not count."""
    found = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append((tuple(x.shape), _torch.mapped_dims(x), tuple(_torch.unwrap(x).shape)))
        return x.sum()

    torch.func.vmap(torch.func.vmap(torch.func.grad(f), 1), 2)(torch.ones(2, 3, 4, 5))
    ((seen, dims, whole),) = found
    left = list(whole)
    for dim in dims:
        del left[dim]
    assert tuple(left) == seen == (2, 5) and len(dims) == 2
    assert _torch.mapped_dims(torch.ones(2)) == []


def test_what_a_backward_saves_is_detached_above_autograd() -> None:
    class Detached(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                found.append(_torch.is_above_autograd())
            return func(*args, **(kwargs or {}))

    found: list[bool] = []
    with _torch.FakeTensorMode(), Detached():
        x = torch.ones(3, requires_grad=True)
        y = torch.tanh(x).sum()
        torch.autograd.grad(y, x, create_graph=True)
        assert found and all(found), "its result, saved and looked up"
        found.clear()
        x.detach()
        with torch.no_grad():
            (x * 2).detach()
        torch.func.grad(lambda x: (x.detach() * torch.tanh(x)).sum())(torch.ones(3))
        assert found and not any(found)


def test_a_backward_node_carries_the_number_that_its_forward_got() -> None:
    running: list[int | None] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, cotangent):  # type: ignore[no-untyped-def]
            running.append(_torch.backward_node_number())
            return cotangent

    x = torch.ones(2, requires_grad=True)
    first = _torch.next_node_number()
    y = Note.apply(x)
    assert _torch.next_node_number() > first
    second = _torch.next_node_number()
    (y * 2).sum().backward()
    assert running[0] is not None and first <= running[0] < second
    assert _torch.backward_node_number() is None


def test_autograd_hands_dispatch_modes_on_to_its_threads() -> None:
    """And to no other thread; CUDA's backwards run in such threads, on which the recorder of a trace is found so."""
    seen: list[tuple[int, list[Any]]] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append((threading.get_ident(), _torch.dispatch_modes()))
        return x

    with _torch.FakeTensorMode() as outer, Count() as inner:
        in_backward_thread(note, torch.ones(2))
        thread = threading.Thread(target=note, args=(torch.ones(2),))
        thread.start()
        thread.join()
        with _torch.disable_modes():
            assert _torch.dispatch_modes() == []
    assert [modes for _, modes in seen] == [[outer, inner], []]
    assert threading.get_ident() not in {thread for thread, _ in seen}


def test_levels_of_torch_func_are_counted() -> None:
    seen: list[tuple[int, bool]] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append((_torch.differentiating_level(), _torch.needs_higher_derivatives()))
        return (x * x).sum()

    x = torch.ones(2)
    f(x)
    torch.func.vmap(f)(torch.ones(3, 2))
    torch.func.grad(f)(x)
    torch.func.vmap(torch.func.grad(f))(torch.ones(3, 2))
    torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(x)
    torch.func.jvp(f, (x,), (x,))
    torch.func.hessian(f)(x)
    assert seen == [(0, False), (0, False), (1, False), (1, False), (2, True), (1, True), (2, True)]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, lambda f: torch.func.grad(torch.func.grad(f))])
def test_wrappers_are_recognised_and_taken_off(transform: Callable[..., Callable[..., torch.Tensor]]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        assert _torch.is_functorch_wrapped(x)
        plain = _torch.unwrap(x)
        assert not _torch.is_functorch_wrapped(plain) and plain.data_ptr() == data.data_ptr()
        return x * x

    data = torch.ones(()) if transform is not torch.func.vmap else torch.ones(3)
    transform(f)(data)
    assert not _torch.is_functorch_wrapped(data) and _torch.unwrap(data) is data


def test_a_transform_is_seen_from_inside() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_inside_transform())
        return x.sin()

    f(torch.ones(()))
    torch.func.grad(f)(torch.ones(()))
    torch.func.vmap(f)(torch.ones(2))
    assert seen == [False, True, True] and not _torch.is_inside_transform()


def test_who_takes_part_in_a_derivative_or_a_vmap() -> None:
    x, found = torch.ones(2), list[bool]()
    assert not _torch.has_functorch_level([x, None, 1])
    assert _torch.has_functorch_level([x, x.clone().requires_grad_()])
    torch.func.grad(lambda y: found.append(_torch.has_functorch_level([x, y])) or y.sum())(x)
    torch.vmap(lambda y: found.append(_torch.has_functorch_level([y])) or y)(x)
    torch.func.grad(lambda y: found.append(_torch.has_functorch_level([x])) or y.sum())(x)
    assert found == [True, True, False], "what a transform only looks on at takes no part"


def test_an_outermost_gradient_has_fused_backwards() -> None:
    """A plain one, of a function that takes no gradient itself; without the context torch decomposes all of them."""

    def seen(gradient: Callable[[torch.Tensor], torch.Tensor]) -> list[bool]:
        found = []
        for context in (_torch.fused_backwards(), nullcontext()):
            with Count() as mode, context:
                gradient(torch.ones(3))
            found.append(aten.silu_backward.default in mode.seen)
        return found

    def once(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x).sum()

    assert seen(torch.func.grad(once)) == [True, False]
    assert seen(torch.func.grad(lambda x: torch.func.grad(once)(x).sum())) == [False, False]
    assert seen(torch.vmap(torch.func.grad(once))) == [False, False]
    twice = torch.func.grad(lambda x: torch.func.grad(once)(x).sum())
    with _torch.fused_backwards():
        inside = twice(torch.ones(3))
    assert torch.equal(inside, twice(torch.ones(3)))


def test_one_gradient_is_recognised() -> None:
    found = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        found.append(_torch.takes_one_gradient())
        return (x**2).sum()

    torch.func.grad(loss)(torch.ones(2))
    with _torch.fused_backwards():
        torch.func.grad(loss)(torch.ones(2))
        torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(torch.ones(2))
        torch.func.vmap(loss)(torch.ones(2, 2))
    assert found == [False, True, False, False]


def test_a_level_of_its_own_inside_a_backward() -> None:
    """Its nodes have numbers of their own, and count as a backward inside the one that runs around them."""
    numbers = []

    class _Copied(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

    class Inside(_Copied):
        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            around = _torch.backward_number()
            numbers.append((_torch.backward_node_number() is None, _torch.backward_node_number(around) is None))
            plain = _torch.unwrap(torch.full((2,), 3.0))
            with _torch.gradient_level([plain]) as (leaf,), Count():
                numbers.append((_torch.differentiating_level() == 1, leaf.requires_grad))
                y = _Noting.apply(leaf**2)
                (found,) = torch.autograd.grad([y], [leaf], [torch.ones(2)])
            return _torch.unwrap(found)

    class _Noting(_Copied):
        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            numbers.append((_torch.backward_node_number() is None, _torch.backward_number() == -1))
            return cotangent

    assert _torch.backward_number() == -1
    assert torch.func.grad(lambda x: Inside.apply(x).sum())(torch.ones(2)).tolist() == [6.0, 6.0]
    assert numbers == [(False, True), (True, True), (False, False)]


def test_the_sources_of_a_gradient() -> None:
    """Between them are only nodes of a number or more. Inputs may be leaves or results."""
    found = []

    def loss(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        h, (first, second) = x * 2, (x * 3).split(1)
        given, since = [h, w, b, first, second], _torch.next_node_number()
        with torch.no_grad():
            gate = b * 2
        results = [h * w, gate * h, second.detach() * 2 + w, second * first]
        found.append([_torch.sources_of_gradients(result, given, since) for result in results])
        return sum((result.sum() for result in results), start=torch.zeros(()))

    torch.func.grad(loss, (0, 1, 2))(torch.ones(2), torch.ones(2), torch.ones(2))
    assert found == [[[0, 1], [0], [1], [3, 4]]]


def test_attributes_that_were_added_to_a_tensor() -> None:
    with _torch.FakeTensorMode():
        fake = torch.ones(2)
    parameter = torch.nn.Parameter(torch.ones(2))
    assert [_torch.added_attributes(x) for x in (fake, torch.ones(2), parameter)] == [{}, {}, {}]
    fake.aux = parameter.aux = 3  # type: ignore[attr-defined]
    assert [_torch.added_attributes(x) for x in (fake, parameter)] == [{"aux": 3}, {"aux": 3}]
