"""Threads around a trace: those in which autograd runs a backward belong to it, those that a user starts do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import checkpoint

import functional_parallel as fp
from functional_parallel.errors import TracingError
from functional_parallel.ir import Traced, aval_of, info, source
from functional_parallel.tracing import trace
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
    assert "the line" in info(cos).source.text and "sin" in str(info(cos).forward_node.target)


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


def test_keys_of_two_threads_are_apart() -> None:
    """Else one would draw from the key of the other, and nobody would notice."""

    def drawn(number: int) -> torch.Tensor:
        with fp.random.using(fp.random.key(number)):
            return fp.random.dropout(torch.ones(64))

    def between() -> torch.Tensor:
        with pytest.raises(fp.errors.RandomKeyError):
            fp.random.dropout(X)
        return drawn(2)

    with fp.random.using(fp.random.key(1)):
        other = in_thread(between)
        own = fp.random.dropout(torch.ones(64))
    assert torch.equal(own, drawn(1)) and torch.equal(other, drawn(2)) and not torch.equal(own, other)


def test_a_key_holds_in_a_backward_too() -> None:
    with fp.random.using(fp.random.key(1)):
        inside = in_backward_thread(fp.random.dropout, torch.ones(64))
    with fp.random.using(fp.random.key(1)):
        assert torch.equal(inside, fp.random.dropout(torch.ones(64)))


def test_stages_and_regions_of_two_threads_are_apart() -> None:
    def other(x: torch.Tensor) -> torch.Tensor:
        with source.recompute_region("other"):
            source.pass_stage_boundary()
            return x.exp()

    def body(x: torch.Tensor) -> list[torch.Tensor]:
        with source.recompute_region("own"):
            found.append(in_thread(lambda: traced(lambda y: [other(y)])))
            return [x.sin()]

    found: list[Traced] = []
    own = traced(body)
    (sin,), (exp,) = ([info(node).source for node in each.nodes] for each in (own, *found))
    assert (sin.region.split()[0], sin.stage) == ("own", 0)
    assert (exp.region.split()[0], exp.stage) == ("other", 1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_in_a_thread_beside_a_trace_computes_again(use_reentrant: bool) -> None:
    calls: list[torch.Tensor] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.sin()

    def train() -> torch.Tensor:
        x = X.clone().requires_grad_()
        checkpoint(counted, x, use_reentrant=use_reentrant).sum().backward()
        return x.grad

    def body(x: torch.Tensor) -> list[torch.Tensor]:
        assert in_thread(lambda: torch.equal(train(), X.cos()))
        return [checkpoint(counted, x, use_reentrant=use_reentrant)]

    assert "checkpoint" in info(next(iter(traced(body).nodes))).source.region
    assert len(calls) == 2 + 1, "twice in the thread, and once, plainly, in the trace"


def test_torchs_own_checkpoint_is_there_again_after_two_traces_that_overlap() -> None:
    module = torch.utils.checkpoint
    torchs = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    inside, go_on = threading.Event(), threading.Event()

    def longer(x: torch.Tensor) -> list[torch.Tensor]:
        inside.set()
        assert go_on.wait(60)
        return [checkpoint(torch.sin, x, use_reentrant=False)]

    found: list[Traced] = []
    thread = threading.Thread(target=lambda: found.append(traced(longer)))

    def body(x: torch.Tensor) -> list[torch.Tensor]:
        thread.start()
        assert inside.wait(60)
        return [x]

    traced(body)
    go_on.set()
    thread.join(60)
    assert "checkpoint" in info(next(iter(found[0].nodes))).source.region
    assert (module.CheckpointFunction, module._checkpoint_without_reentrant_generator) == torchs


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
