"""Other functions of a step's parameters, on its states: what they are of whole parameters, without gathering those."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import PipelineError
from sharding_specs import Mesh, P, SpecError

from ..errors.test_bad_input import message
from ..processes import run_on_processes

SPECS = {"w1": P(None, "tensor"), "w2": P("tensor"), "name": P()}
TENSOR = fp.tensor_parallel("tensor", SPECS)
PLANS: dict[str, tuple[Any, Mesh]] = {
    "none": (lambda f: f, Mesh(data=1)),
    "data": (fp.data_parallel("data"), Mesh(data=2)),
    **{f"zero {stage}": (fp.zero(stage, "data"), Mesh(data=4)) for stage in range(4)},
    "flat": (fp.zero(2, "data", layout="flat"), Mesh(data=2)),
    "tensor, zero 3": (fp.chain(TENSOR, fp.zero(3, "data")), Mesh(data=2, tensor=2)),
    "accumulated": (fp.chain(TENSOR, fp.zero(1, "data"), fp.accumulate(2)), Mesh(data=2, tensor=2)),
    "pipeline": (fp.chain(fp.zero(3, "data"), fp.pipeline("pipe", microbatches=2)), Mesh(pipe=2, data=2)),
}


def parameters() -> dict[str, Any]:
    """With a dim that no axis divides, and a leaf that is no tensor."""
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64)  # noqa: E731
    return {"w1": draw(3, 6), "w2": draw(6, 3), "name": "two layers"}


def predict(params: dict[str, Any], x: Tensor) -> Tensor:
    return fp.stage_boundary(torch.tanh(x @ params["w1"])) @ params["w2"]


def loss(params: dict[str, Any], x: Tensor, y: Tensor) -> Tensor:
    return (predict(params, x) - y).square().mean()


def worst(params: dict[str, Any], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Results of several kinds: one per sample, one over all samples, a parameter."""
    each = (predict(params, x) - y).square().sum(1)
    return {"each": each, "mean": each.mean(), "w1": params["w1"]}


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, 3, generator=generator, dtype=torch.float64)
    return x, y


def found(plan: str, own: int | None = None) -> list[Any]:
    """What functions say of states between steps, and beside it what they are of whole parameters."""
    transform, mesh = PLANS[plan]
    x, y = batch()
    part = slice(None) if own is None else slice(4 * own, 4 * own + 4)
    how = "global" if own is None else "own"
    train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, transform, batch=how)
    functions = [train.compile(transform(f)) for f in (loss, worst)]
    slopes, state = train.compile(fp.grad(transform(loss))), train.init(parameters())
    pairs = []
    for _ in range(2):
        state, _ = train(state, x[part], y[part])
        now = [function(state, x[part], y=y[part]) for function in functions]
        gradient = slopes(state, x[part], y[part])
        params = train.params(state)
        pairs.append((now, [loss(params, x, y), worst(params, x, y)]))
        pairs.append((gradient["w1"], fp.grad(loss)(params, x, y)["w1"]))
    return pairs


@pytest.mark.parametrize("plan", PLANS)
def test_it_is_the_function_of_the_whole_parameters(plan: str) -> None:
    for mine, whole in found(plan):
        torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)


def on_a_rank(rank: int, plans: list[str], own: bool) -> list[Any]:
    return [found(plan, rank if own else None) for plan in plans]


@pytest.mark.parametrize(
    ("ranks", "plans", "own"),
    [(2, ["data", "flat"], True), (4, ["zero 3", "tensor, zero 3", "accumulated", "pipeline"], False)],
)
def test_the_same_on_processes(ranks: int, plans: list[str], own: bool) -> None:
    for every_plan in run_on_processes(on_a_rank, ranks, plans, own):
        for pairs in every_plan:
            for mine, whole in pairs:
                torch.testing.assert_close(mine, whole, rtol=1e-12, atol=1e-12)


def test_only_what_the_plan_gathers_is_gathered() -> None:
    """Of zero(3), one parameter after another, as in the loss; and nothing is summed that is asked of each sample."""
    transform, mesh = PLANS["zero 3"]
    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, transform, bucket=None)
    predicted = train.compile(transform(predict))
    state = train.init(parameters())
    assert predicted.lower(state, batch()[0]).counts() == {("all_gather", ("data",)): 2}
    assert "all_gather" in str(predicted.explain())


def test_the_state_goes_on_as_if_nothing_had_been_asked() -> None:
    transform, mesh = PLANS["pipeline"]
    ends = []
    for asked in (False, True):
        train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, transform)
        predicted, state = train.compile(transform(predict)), train.init(parameters())
        for _ in range(3):
            state, _ = train(state, *batch())
            if asked:
                predicted(state, batch()[0])
        ends.append([leaf for leaf in optree.tree_leaves(train.whole(state)) if isinstance(leaf, Tensor)])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_results_are_no_part_of_the_state() -> None:
    """Whose memory the next step writes into."""
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=1))
    state = train.init(parameters())
    kept = train.compile(lambda params: (params["w1"], params["w1"].mT))(state)
    before = [each.clone() for each in kept]
    train(state, *batch())
    assert all(map(torch.equal, kept, before))


def test_stacked_layers_by_another_plan_of_the_same_kind() -> None:
    def deep(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for layer in range(4):
            x = torch.tanh(x @ params["layers"][layer])
        return x.square().mean()

    def plan() -> Any:
        return fp.pipeline("pipe", {"layers": P("pipe")}, microbatches=2)

    train = fp.train_step(deep, fp.optim.sgd(0.1), Mesh(pipe=2), plan())
    state = train.init({"layers": torch.randn(4, 3, 3, dtype=torch.float64)})
    for transform in (plan(), plan()):
        slopes = train.compile(fp.grad(transform(deep)))(state, batch()[0])
        wanted = torch.func.grad(deep)(train.params(state), batch()[0])
        torch.testing.assert_close(slopes, wanted, rtol=1e-12, atol=1e-12)
    otherwise = train.compile(fp.pipeline("pipe", microbatches=2)(deep))
    said = message(lambda: otherwise(state, batch()[0]), ValueError)
    assert "{'layers': [*, *, *, *]} in the state, as {'layers': *}" in said and "step's own plan" in said


def test_what_lies_otherwise_is_refused() -> None:
    transform, mesh = PLANS["zero 3"]
    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, transform)
    state = train.init(parameters())
    said = message(lambda: train.compile(fp.zero(1, "data")(predict))(state, batch()[0]), SpecError)
    assert "w1: P(None, 'data', padded={1: 6}) in the state" in said or "w1: P(" in said
    assert "for predict" in said and "train.compile(plan(predict))" in said
    with pytest.raises(TypeError, match=r"takes a TrainState, not dict"):
        train.compile(transform(predict))(parameters(), batch()[0])
    with pytest.raises(ValueError, match=r"has no pipeline, that of .* has a pipeline over 'data'"):
        train.compile(fp.pipeline("data", microbatches=2)(predict))


def test_a_pipeline_that_updates_on_its_way_is_refused() -> None:
    plan = fp.pipeline("pipe", schedule="pipedream", microbatches=4)
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(pipe=2), plan)
    with pytest.raises(PipelineError, match="take a synchronous schedule"):
        train.compile(plan(predict))
    state, _ = train(train.init(parameters()), *batch())
    checked = train.compile(fp.pipeline("pipe", microbatches=4)(predict))
    torch.testing.assert_close(checked(state, batch()[0]), predict(train.params(state), batch()[0]))
