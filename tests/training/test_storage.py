"""Parameters and state that are stored at rest in another form: results, collectives and checkpoints are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.runtime.handles import PipelineValue
from functional_parallel.training import TrainStep
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from ..storages import STORAGES

ZERO = lambda **at: fp.zero(3, "data", {"w/*": P("data", **at)})  # noqa: E731
TENSOR = lambda **at: fp.tensor_parallel("tensor", {"w/*": P(None, "tensor", **at)})  # noqa: E731
BOTH = {"data": 2, "tensor": 2}
PLANS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "zero 3": (ZERO, {"data": 2}),
    "zero 2": (lambda **at: fp.zero(2, "data", {"w/*": P("data", **at)}), {"data": 2}),
    "flat": (lambda **at: fp.chain(TENSOR(**at), fp.zero(2, "data", layout="flat")), BOTH),
    "tensor and zero 3": (
        lambda **at: fp.chain(fp.mixed_precision("bf16"), TENSOR(**at), fp.zero(3, "data"), fp.accumulate(2)),
        BOTH,
    ),
    "pipeline": (lambda **at: fp.chain(ZERO(**at), fp.pipeline("pipe", microbatches=2)), {"data": 2, "pipe": 2}),
    "replicas": (lambda **at: fp.chain(TENSOR(**at), fp.local_sgd("data", inner=2)), BOTH),
}


def network(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params["w"]:
        x = torch.tanh(x @ w)
    return x.square().mean()


def arguments() -> tuple[Any, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(4, 4, generator=make, dtype=torch.float64) for _ in range(5))
    return {"w": weights}, x


def trained(plan: Any, mesh: Mesh) -> tuple[TrainStep, Any, Any]:
    params, x = arguments()
    train = fp.train_step(network, fp.optim.adamw(0.125), mesh, plan)
    state = train.init(params)
    for _ in range(2):
        state, metrics = train(state, x)
    return train, state, metrics


def are_same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, optree.tree_leaves(a), optree.tree_leaves(b)))


@pytest.mark.parametrize("name", PLANS)
def test_a_step_stores_what_it_keeps_and_has_the_same_results(name: str, tmp_path: Path) -> None:
    make, axes = PLANS[name]
    mesh, (_, x) = Mesh(axes), arguments()
    plain, expected, metrics = trained(make(), mesh)
    train, state, found = trained(make(form="negative"), mesh)
    assert are_same(found, metrics) and are_same(train.whole(state), plain.whole(expected))
    assert train.program.counts() == plain.program.counts()
    rows = [each for each in zip(state.handles, expected.handles, state.layout.specs, strict=True) if each[2].storage]
    assert len(rows) >= 4
    for handle, fetched, _ in rows:
        parts = [each.parts if isinstance(each, PipelineValue) else {0: each} for each in (handle, fetched)]
        assert all(torch.equal(a, -b) for key in parts[0] for a, b in zip(parts[0][key], parts[1][key], strict=True))
    if name == "replicas":
        return
    value = train.compile(make(form="negative")(network))(state, x)
    assert torch.equal(value, plain.compile(make()(network))(expected, x))
    moved = plain.load(state)
    assert are_same(plain.whole(moved), train.whole(state)) and are_same(
        train.whole(train.load(moved)), train.whole(state)
    )
    train.save(state, tmp_path / "checkpoint")
    assert are_same(train.whole(train.restore(tmp_path / "checkpoint")), train.whole(state))


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_a_compiled_function_fetches_its_arguments(data: st.DataObject) -> None:
    """So do its derivatives, by `fp.grad` inside and by torch.func outside."""
    storage, stage = data.draw(STORAGES), data.draw(st.sampled_from([1, 3]))
    w, x = torch.arange(8.0).double().reshape(4, 2), torch.arange(16.0).double().reshape(4, 4)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).square().sum()

    plan = fp.zero(stage, "data", P("data", **storage))
    expected = torch.func.grad_and_value(loss)(w, x)
    assert are_same(fp.compile(fp.grad_and_value(plan(loss)), Mesh(data=2))(w, x), expected)
    assert are_same(torch.func.grad_and_value(fp.compile(plan(loss), Mesh(data=2)))(w, x), expected)

    @fp.shard_map(Mesh(data=2), in_specs=P("data", **storage), out_specs=P(None, "data", **data.draw(STORAGES)))
    def columns(x: torch.Tensor) -> torch.Tensor:
        return fp.relayout(x, P("data"), P(None, "data"))

    assert torch.equal(columns(x), x)


def on_rank(rank: int, folder: str) -> bool:
    plan, mesh = PLANS["zero 3"][0], Mesh(data=2)
    plain, expected, metrics = trained(plan(), mesh)
    train, state, found = trained(plan(form="negative"), mesh)
    assert are_same(found, metrics) and are_same(train.whole(state), plain.whole(expected))
    assert all(torch.equal(a, -b) for a, b in zip(state.handles[:4], expected.handles[:4], strict=True))
    assert are_same(train.whole(train.load(plain.load(state))), plain.whole(expected))
    train.save(state, folder)
    restored = train.restore(folder)
    return are_same(restored.handles, state.handles) and are_same(train.whole(restored), train.whole(state))


def test_real_processes(tmp_path: Path) -> None:
    assert run_on_processes(on_rank, 2, str(tmp_path / "checkpoint")) == [True, True]


def test_a_plan_with_a_storage_is_data() -> None:
    plan = fp.chain(ZERO(form="negative"), fp.accumulate(2))
    assert eval(repr(plan), {"fp": fp, "P": P}) == plan == fp.Plan.from_json(plan.to_json())
    assert plan != fp.chain(ZERO(), fp.accumulate(2))


def test_values_inside_a_program_have_no_storage() -> None:
    with pytest.raises(fp.errors.SpecError, match="and a storage have no effect there"):
        fp.constrain(torch.ones(2), P("data", form="negative"))
    body = fp.shard_map(torch.sin, Mesh(data=2), in_specs=P("data", form="negative"), out_specs=P("data"))
    with pytest.raises(fp.errors.LayoutError, match="nor stored; name dims alone"):
        fp.compile(fp.data_parallel("data")(lambda w, x: body(x).sum()), Mesh(data=2))(torch.ones(2), torch.ones(4))
