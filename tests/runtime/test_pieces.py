"""A program runs as pieces of Python code: no value lives longer for it, and the time to compile them is linear."""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import functional_parallel as fp
from functional_parallel.ir import NodeInfo, Traced, info, set_info
from functional_parallel.runtime.execution import Writer, pieces
from functional_parallel.runtime.execution.codegen import failing_op
from sharding_specs import Mesh, P

from ..program.test_memory import measured, random_step

aten = torch.ops.aten


@pytest.fixture(params=[(1, 1), (2, 5)], ids=str)
def cut_small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    least, most = request.param
    monkeypatch.setattr(pieces, "_LEAST", least)
    monkeypatch.setattr(pieces, "_MOST", most)


def function_of(traced: Traced, **options: Any) -> Any:
    return Writer(traced, lambda node, writer: writer.call(node, writer.names.__getitem__), **options).function()


def chain(length: int) -> Any:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x + 1
        for _ in range(length):
            x = torch.tanh(x) * first
        return x, first

    return fp.compile(f, Mesh(), in_specs=P(), out_specs=P()).lower(torch.ones(2))


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.every(6)
def test_no_value_lives_longer(seed: int) -> None:
    words, program = random_step(seed)
    assert program.memory().peak == measured(program), words


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("differentiable", [False, True])
def test_pieces_compute_what_one_function_does(differentiable: bool) -> None:
    program, x = chain(20), torch.randn(2, dtype=torch.float64)
    run = function_of(program.traced, differentiable=differentiable)
    first, wanted = x + 1, x
    for _ in range(20):
        wanted = torch.tanh(wanted) * first
    for _ in range(2):  # constants and results of a run are not those of the next
        given = [x]
        assert all(map(torch.equal, run(given), [wanted, first]))
        assert given == []


class Handle:
    """Stands for a collective in flight."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def wait(self) -> Tensor:
        return self.x


@pytest.mark.usefixtures("cut_small")
def test_handles_are_waited_for_once_and_let_go_of() -> None:
    """One result is read by an op and twice later, one only returned, and one has to end before another op begins."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    started = [graph.call_function(aten.neg.default, (x,)) for _ in range(3)]
    ops = [graph.call_function(aten.sin.default, (x,))]
    for _ in range(8):
        ops.append(graph.call_function(aten.add.Tensor, (ops[-1], x)))
    ops.append(graph.call_function(aten.add.Tensor, (ops[-1], started[0])))
    for _ in range(8):
        ops.append(graph.call_function(aten.add.Tensor, (ops[-1], started[0])))
    ops.append(graph.call_function(aten.mul.Tensor, (ops[-1], started[2])))
    for node in (x, *started, *ops):
        set_info(node, NodeInfo())
    traced = Traced(graph, [x], [ops[-1], started[1], 3])
    traced.seal()
    handles: list[weakref.ref[Handle]] = []
    alive: list[list[bool]] = []

    def start(value: Tensor) -> Handle:
        handle = Handle(-value)
        handles.append(weakref.ref(handle))
        return handle

    def add(a: Tensor, b: Tensor) -> Tensor:
        alive.append([handle() is not None for handle in handles])
        return a + b

    def line(node: fx.Node, writer: Writer) -> str:
        if node in started:
            writer.pending.add(node)
            return f"{writer.constant(start)}({writer.names[node.args[0]]})"
        if node.target is aten.add.Tensor:
            return f"{writer.constant(add)}({', '.join(writer.names[each] for each in node.args)})"
        return writer.call(node, writer.names.__getitem__)

    run = Writer(traced, line, readers={ops[4]: [started[2]]}).function()
    value = torch.tensor([1.0, 2.0])
    total, returned, number = run([value])
    assert torch.equal(total, (value.sin() + 8 * value - 9 * value) * -value)
    assert torch.equal(returned, -value) and number == 3
    ends = [next(at for at, held in enumerate(alive) if not held[index]) for index in (0, 2)]
    assert ends == [8, 3] and all(held[1] for held in alive)


@torch.library.custom_op("tests_pieces::fail", mutates_args=())
def fail(x: Tensor) -> Tensor:
    raise RuntimeError("it failed")


@fail.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.usefixtures("cut_small")
@pytest.mark.parametrize("before", [0, 1, 7])
def test_an_error_names_its_op(before: int) -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(before):
            x = torch.tanh(x)
        x = fail(x)
        return torch.tanh(x)

    program: Any = fp.compile(f, Mesh(), in_specs=P(), out_specs=P()).lower(torch.ones(2))
    run = function_of(program.traced)
    with pytest.raises(RuntimeError, match="it failed") as raised:
        run([torch.ones(2)])
    assert failing_op(raised.value) == f"tests_pieces.fail.default at test_pieces.py:{f.__code__.co_firstlineno + 3}"


def compiled(program: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that a program's function is compiled from."""
    found: list[str] = []

    def recorded(source: str, *args: Any) -> Any:
        found.append(source)
        return compile(source, *args)

    with monkeypatch.context() as patch:
        patch.setattr(pieces, "_compiled", lru_cache(recorded))
        function_of(program.traced)
    return found


def test_equal_layers_are_compiled_once_and_others_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_LEAST", 10)
    monkeypatch.setattr(pieces, "_MOST", 40)
    counts = [len(compiled(chain(length), monkeypatch)) for length in (60, 120)]
    assert counts[0] == counts[1] <= 4, counts

    def other(x: Tensor) -> Tensor:
        for number in range(60):
            x = torch.tanh(x) * number
        return x

    texts = compiled(fp.compile(other, Mesh(), in_specs=P(), out_specs=P()).lower(torch.ones(2)), monkeypatch)
    assert len(texts) >= 3 and max(text.count("\n") for text in texts) < 100


def test_the_inputs_that_no_op_reads_are_returned() -> None:
    program: Any = fp.compile(lambda x, y: (y, x), Mesh(), in_specs=(P(), P()), out_specs=P())
    program = program.lower(torch.ones(2), torch.ones(3))
    x, y = torch.ones(2), torch.ones(3)
    assert [info(node).aval.shape for node in program.traced.inputs] == [(2,), (3,)]
    assert all(a is b for a, b in zip(function_of(program.traced)([x, y]), (y, x), strict=True))
