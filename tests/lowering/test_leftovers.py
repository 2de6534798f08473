"""What making a program leaves in memory: the program."""

from __future__ import annotations

import ctypes
import gc
import linecache
import weakref
from typing import Any

import optree
import pytest
import torch
from torch import fx

import functional_parallel as fp
from functional_parallel import _torch
from functional_parallel.ir import info
from functional_parallel.ir.graph import Aval, aval_of
from functional_parallel.lowering import leftovers
from sharding_specs import Mesh, P

from ..processes import run_on_processes

LAYERS, SIZE = 2, 8
PLANS = {
    "ddp": fp.data_parallel("data"),
    "zero-3": fp.zero(3, "data"),
    "two axes": fp.chain(fp.tensor_parallel("tensor", {"w*": P(None, "tensor")}), fp.data_parallel("data")),
    "accumulated": fp.chain(fp.data_parallel("data"), fp.accumulate(2)),
}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in params.values():
        x = torch.tanh(x @ w)
    return x.square().mean()


def made(plan: Any, mesh: Mesh, batch: int = 8) -> Any:
    params = {f"w{index}": torch.ones(SIZE, SIZE) for index in range(LAYERS)}
    train = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, plan)
    return train.lower(params, torch.ones(batch, SIZE)), train


def living() -> list[weakref.ref[fx.Node]]:
    gc.collect()
    return [weakref.ref(each) for each in gc.get_objects() if type(each) is fx.Node]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_only_the_programs_own_graph_stays(plan: Any) -> None:
    mesh = Mesh(data=2, tensor=2)
    before = len(living())
    program, train = made(plan, mesh)
    added = len(living()) - before
    own = len(program.traced.graph.nodes) + 1  # and the root of its list
    assert added == own, f"{added} nodes are alive, of which the program has {own}"
    assert train.program is program


def test_a_pipeline_keeps_no_traced_parts() -> None:
    """Of the graphs that were on the way to its programs, values that the programs pass on to each other stay."""
    before = len(living())
    program, train = made(fp.pipeline("pipe", schedule="1f1b", microbatches=4), Mesh(pipe=2))
    own = sum(len(each.traced.graph.nodes) + 1 for each in program.every_program())
    added = len(living()) - before
    assert added <= 1.5 * own, f"{added} nodes are alive, of which the programs have {own}"
    assert train.program is program


def test_fake_modes_remember_no_more_shapes_than_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_MOST_SHAPES", 0)
    known = len(_torch.FakeTensorMode.cache)
    for batch in (8, 16, 24):
        made(PLANS["ddp"], Mesh(data=2), batch)
        assert len(_torch.FakeTensorMode.cache) == known


def test_lines_of_libraries_are_forgotten_and_those_of_others_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_MOST_LINES", 0)
    cell = "<ipython-input-7>"
    linecache.cache[cell] = (5, None, ["x = 1\n"], cell)
    lazy = "<lazy>"
    linecache.cache[lazy] = (lambda: "y = 1\n",)
    try:
        assert linecache.getline(torch.__file__, 1) and linecache.getline(__file__, 1)
        program, _ = made(PLANS["ddp"], Mesh(data=2))
        assert torch.__file__ not in linecache.cache and leftovers.__file__ not in linecache.cache
        assert {cell, lazy, __file__} <= linecache.cache.keys()
        assert "x = torch.tanh(x @ w)" in {info(node).source.text for node in program.traced.nodes}
        assert linecache.getline(torch.__file__, 1), "they are read again when somebody asks"
    finally:
        del linecache.cache[cell], linecache.cache[lazy]


def test_equal_shapes_are_one_object() -> None:
    assert aval_of(torch.ones(2, 3)) is aval_of(torch.zeros(2, 3))
    assert aval_of(torch.ones(2, 3)) == Aval((2, 3), torch.float32)
    program, _ = made(PLANS["ddp"], Mesh(data=2))
    types = [info(node).type for node in program.traced.nodes if info(node).type is not None]
    assert len({id(each) for each in types}) < len(types) / 4


def test_a_program_tells_the_same_when_it_is_made_again() -> None:
    """Passes are told of by tracing anew, which nothing that was dropped may hinder."""
    program, train = made(PLANS["zero-3"], Mesh(data=2))
    assert "gathers" in str(program.explain(group="pass"))
    assert program.after("views").splitlines()[-1] == str(program).splitlines()[-1]
    again, _ = made(PLANS["zero-3"], Mesh(data=2))
    assert again.lines() == program.lines() and train.program is program


def test_a_failure_leaves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_MOST_SHAPES", 0)
    known = len(_torch.FakeTensorMode.cache)
    step = fp.compile(fp.data_parallel("data")(lambda x: x.sum() * x.sum().item()), Mesh(data=2))
    with pytest.raises(ValueError, match="values"):
        step.lower(torch.ones(4))
    assert len(_torch.FakeTensorMode.cache) == known


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_became_garbage_inside_is_collected() -> None:
    assert gc.isenabled()
    older = weakref.ref(Cycle())
    gc.collect(0)
    with leftovers.release_trace_memory():
        garbage = weakref.ref(Cycle())
        with leftovers.release_trace_memory():
            pass
        assert garbage() is not None, "only the outermost collects"
    assert garbage() is None and gc.isenabled()
    assert older() is None
    with pytest.raises(ZeroDivisionError), leftovers.release_trace_memory():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_who_forbids_collections_gets_none() -> None:
    gc.disable()
    try:
        with leftovers.release_trace_memory():
            garbage = weakref.ref(Cycle())
        assert garbage() is not None and not gc.isenabled()
    finally:
        gc.enable()


def test_pages_are_given_back_once_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(leftovers, "_trim", calls.append)
    fp.compile(fp.data_parallel("data")(lambda x: x.sum()), Mesh(data=2)).lower(torch.ones(4))
    assert calls == [0]


def test_free_pages_can_be_given_back_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    leftovers.give_back_pages()
    monkeypatch.setattr(leftovers, "_trim", None)
    leftovers.give_back_pages()
    assert optree.tree_leaves(made(PLANS["ddp"], Mesh(data=2))[0].counts())


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc's malloc is told, and tells")
def test_pages_that_a_step_frees_are_there_for_the_next_step() -> None:
    """A large block is from the heap, of which malloc keeps twice as much, and not from the system and back to it."""
    assert run_on_processes(blocks_from_the_system, 1) == [[1, 0]], "blocks of 16 MiB, before and after"


def blocks_from_the_system(rank: int) -> list[int]:
    """In a process that has made no program yet."""
    told = ctypes.CDLL(None).mallinfo2
    told.restype = MallocInfo
    held = []  # for a block that is freed counts itself

    def from_the_system() -> int:
        before = told().hblks
        held.append(torch.empty(16 << 20, dtype=torch.uint8))
        return int(told().hblks - before)

    before = from_the_system()
    leftovers.keep_pages()
    return [before, from_the_system()]


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]
