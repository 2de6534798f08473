"""What making a program leaves in memory: the program."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import fx

import functional_parallel as fp
from functional_parallel import _torch
from functional_parallel.ir import Aval, aval_of, info
from functional_parallel.lowering import leftovers
from sharding_specs import Mesh, P

LAYERS, SIZE = 6, 8
PLANS = {
    "ddp": fp.data_parallel("data"),
    "zero-3": fp.zero(3, "data"),
    "two axes": fp.chain(fp.tensor_parallel("tensor", {"w*": P(None, "tensor")}), fp.data_parallel("data")),
    "accumulated": fp.chain(fp.data_parallel("data"), fp.accumulate(2)),
}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in params.values():
        x = x + torch.tanh(x @ w) * 0.5  # enough ops for layers that are staged once
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
    with leftovers.traced_in():
        garbage = weakref.ref(Cycle())
        with leftovers.traced_in():
            pass
        assert garbage() is not None, "only the outermost collects"
    assert garbage() is None and gc.isenabled()
    assert older() is None
    with pytest.raises(ZeroDivisionError), leftovers.traced_in():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_who_forbids_collections_gets_none() -> None:
    gc.disable()
    try:
        with leftovers.traced_in():
            garbage = weakref.ref(Cycle())
        assert garbage() is not None and not gc.isenabled()
    finally:
        gc.enable()
