"""Threads around a trace: those in which autograd runs a backward belong to it, those that a user starts do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.tracing import TracingError, trace
from functional_parallel.tracing.graph import Traced, aval_of
from functional_parallel.tracing.record import recorder
from sharding_specs import Mesh, P

from .threads import in_backward_thread

DATA = Mesh(data=2)
X = torch.arange(4.0, dtype=torch.float64)


def in_thread(call: Callable[[], Any]) -> Any:
    """What a call returns in a thread of the user's, which has ended."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and found
    return found[0]


def shard_map(body: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return fp.compile(body, DATA, in_specs=P("data"), out_specs=P("data"))


def traced(f: Callable[[torch.Tensor], Any]) -> Traced:
    return trace(f, [aval_of(X)])


# ---------------------------------------------------------------------------------------------------------------------
# Autograd's
# ---------------------------------------------------------------------------------------------------------------------


def test_a_backward_in_another_thread_is_recorded() -> None:
    seen: list[Any] = []

    def squared(x: torch.Tensor) -> torch.Tensor:
        seen.append((threading.get_ident(), recorder()))
        return x * x

    def body(x: torch.Tensor) -> torch.Tensor:
        seen.append((threading.get_ident(), recorder()))
        return in_backward_thread(squared, x + 1)

    assert torch.equal(shard_map(body)(X), (X + 1) * (X + 1))
    (own, recording), (other, same) = seen
    assert own != other and recording is same is not None


def test_a_compiled_function_is_refused_in_such_a_backward_too() -> None:
    step = fp.compile(fp.data_parallel("data")(lambda x: x.sum()), DATA)
    with pytest.raises(fp.LayoutError, match="inside a function that is being traced"):
        shard_map(lambda x: in_backward_thread(step, x))(X)


def test_a_trace_in_such_a_backward_is_a_part_of_the_outer_one() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        found = trace(lambda y: [y * x], [aval_of(x)])
        assert found.captured == [x]
        return x.exp()

    assert "exp" in str([node.target for node in traced(lambda x: [in_backward_thread(inner, x)]).nodes])


def test_lines_of_forward_ops_outlast_such_a_backward() -> None:
    """Each thread numbers autograd's nodes by itself, and by these numbers a backward op finds its forward's line."""

    def f(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = torch.sin(x)  # the line
        nested = in_backward_thread(lambda z: (z * z).requires_grad_() * 2, x)
        return [torch.autograd.grad((y * nested.detach()).sum(), x)[0]]

    (cos,) = [node for node in traced(f).nodes if "cos" in str(node.target)]
    assert "the line" in cos.meta["source"].text and "sin" in str(cos.meta["forward"].target)


# ---------------------------------------------------------------------------------------------------------------------
# A user's
# ---------------------------------------------------------------------------------------------------------------------


def test_a_compiled_function_runs_in_a_thread_beside_a_trace() -> None:
    total = fp.compile(fp.data_parallel("data")(lambda x: x.sum()), DATA)
    body = shard_map(lambda x: x * in_thread(lambda: total(X).item()))
    assert torch.equal(body(X), X * 6)


def test_two_traces_at_a_time_are_apart() -> None:
    """Each thread's recorder is its own, also while the other one traces."""
    inside, go_on = threading.Event(), threading.Event()
    results: list[torch.Tensor] = []

    def other(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(60)
        return fp.grad(lambda y: y.square().sum())(x)  # in a body: asks the recorder for types

    def body(x: torch.Tensor) -> torch.Tensor:
        own = recorder()
        thread = threading.Thread(target=lambda: results.append(shard_map(other)(X)))
        thread.start()
        assert inside.wait(60) and recorder() is own
        gradient = fp.grad(lambda y: (y * y * y).sum())(x)
        go_on.set()
        thread.join(60)
        assert not thread.is_alive()
        return gradient

    assert torch.equal(shard_map(body)(X), 3 * X * X)
    assert torch.equal(results[0], 2 * X)


@pytest.mark.parametrize("kind", ["op", "backward"])
def test_what_a_users_thread_computes_is_refused(kind: str) -> None:
    """Its ops are not seen, and their result would be taken for an argument that nobody passes."""

    def f(x: torch.Tensor) -> torch.Tensor:
        if kind == "op":
            return in_thread(lambda: x * 2) + 1
        y = x.detach().requires_grad_()
        z = y.square().sum()
        return in_thread(lambda: torch.autograd.grad(z, y)[0]) + 1

    total = fp.compile(fp.data_parallel("data")(lambda x: f(x).sum()), DATA)
    for call, shape in ((shard_map(f), 2), (total, 4)):
        with pytest.raises(TracingError, match=rf"test_threads.py:\d+: a tensor of shape \({shape},\) was computed"):
            call(X)
