"""A training step takes the states that are its own, of any parameters, and refuses others before it computes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

DATA = Mesh(data=2)
OPTIMIZERS = {
    "sgd": fp.optim.sgd(0.5),
    "momentum": fp.optim.sgd(0.5, momentum=0.5),
    "adamw": fp.optim.adamw(0.5),
    "lion": fp.optim.lion(0.5),
    "adafactor": fp.optim.adafactor(0.5),
}
PLANS = {
    "data": fp.data_parallel("data"),
    "zero 1": fp.zero(1, "data"),
    "flat": fp.zero(1, "data", layout="flat"),
    "zero 3": fp.zero(3, "data"),
}
X = torch.arange(16, dtype=torch.float64).reshape(4, 4) / 8


def loss(params: Any, x: Tensor) -> Tensor:
    return sum((x @ w).square().mean() for w in optree.tree_leaves(params))  # type: ignore[return-value]


def step(optimizer: str = "adamw", plan: str = "data", **options: Any) -> Any:
    return fp.train_step(loss, OPTIMIZERS[optimizer], DATA, PLANS[plan], **options)


def weights(*columns: int) -> dict[str, Tensor]:
    return {f"w{number}": torch.ones(4, size, dtype=torch.float64) for number, size in enumerate(columns)}


# -----------------------------------------------------------------------------
# An optimizer's state is one of the parameters beside it
# -----------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(["data", "zero 1", "zero 3"]),
)
def test_a_state_is_loaded_with_its_own_parameters_alone(
    columns: list[int], others: list[int], optimizer: str, other: str, plan: str
) -> None:
    saved = OPTIMIZERS[other].init(weights(*others))
    fits = optree.tree_map(_look, OPTIMIZERS[optimizer].init(weights(*columns))) == optree.tree_map(_look, saved)
    train = step(optimizer, plan)
    if fits and type(saved) is type(OPTIMIZERS[optimizer].init(weights(1))):
        train(train.load(weights(*columns), saved, 3), X)
    else:
        with pytest.raises(ValueError, match="does not belong to these parameters"):
            train.load(weights(*columns), saved, 3)


def _look(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype


def test_a_state_of_other_shapes_is_refused_by_path() -> None:
    saved = OPTIMIZERS["adamw"].init(weights(2))
    with pytest.raises(ValueError) as caught:
        step().load(weights(64), saved, 0)
    said = str(caught.value)
    assert "optimizer_state.mean['w0']: (4, 2) float64; the optimizer keeps (4, 64) float64" in said
    assert "optimizer_state.square['w0']" in said and "one `train.whole(state)`" in said and "train.init" in said


def test_a_state_of_another_dtype_is_refused() -> None:
    saved = OPTIMIZERS["adamw"].init(optree.tree_map(Tensor.float, weights(2)))
    with pytest.raises(ValueError, match=r"mean\['w0'\]: \(4, 2\) float32; the optimizer keeps \(4, 2\) float64"):
        step().load(weights(2), saved, 0)


def test_a_state_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(AdamWState\) does not belong .* keeps SGDState"):
        step("momentum").load(weights(2), OPTIMIZERS["adamw"].init(weights(2)), 0)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(ValueError, match=r"mean\['w1'\]: missing; the optimizer keeps \(4, 3\) float64"):
        step().load(weights(2, 3), OPTIMIZERS["adamw"].init(weights(2)), 0)


def test_stacks_of_layers_are_compared_as_the_user_has_them() -> None:
    def stacked(params: dict[str, Tensor], x: Tensor) -> Tensor:
        for w in params["w"]:
            x = torch.tanh(x @ w)
        return x.square().mean()

    plan = fp.pipeline("pipe", {"w": P("pipe")}, microbatches=2)
    train = fp.train_step(stacked, OPTIMIZERS["adamw"], Mesh(pipe=2), plan)
    params = {"w": torch.ones(2, 4, 4, dtype=torch.float64)}
    saved = train.whole(train.init(params))
    train(train.load(*saved, 0), X)
    other = OPTIMIZERS["adamw"].init({"w": torch.ones(2, 4, 5, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"mean\['w'\]: \(2, 4, 5\) float64; the optimizer keeps \(2, 4, 4\)"):
        train.load(params, other, 0)


SAVED = OPTIMIZERS | {
    "adagrad": fp.optim.adagrad(0.5),
    "lamb": fp.optim.lamb(0.5),
    "muon": fp.optim.muon(0.5),
    "by_path": fp.optim.by_path({"*": fp.optim.adamw(0.5)}),
}


@pytest.mark.parametrize("optimizer", SAVED)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_saved_state_is_read_without_running_code(optimizer: str, scaled: bool, tmp_path: Path) -> None:
    plan = fp.chain(fp.mixed_precision("fp16"), PLANS["data"]) if scaled else PLANS["zero 1"]
    train = fp.train_step(loss, SAVED[optimizer], DATA, plan)
    state, _ = train(train.init(weights(2, 3)), X)
    whole = train.whole(state)
    torch.save(whole, tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert optree.tree_structure(loaded) == optree.tree_structure(whole)
    assert optree.tree_all(optree.tree_map(torch.equal, train.whole(train.load(*loaded, 1)), whole))


# -----------------------------------------------------------------------------
# States of several forms
# -----------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2), min_size=2, max_size=3),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from(sorted(PLANS)),
    st.booleans(),
)
def test_one_step_trains_parameters_of_any_shapes_in_turn(
    many: list[list[int]], optimizer: str, plan: str, lowered: bool
) -> None:
    if optimizer == "adafactor" and plan == "flat":
        return
    train, before = step(optimizer, plan), []
    for columns in many:
        if lowered:
            train.lower(weights(*columns), X)
        before.append(train.init(weights(*columns)))
    for columns, state in zip(many, before, strict=True):
        after, metrics = train(state, X)
        alone = step(optimizer, plan)
        want, wanted = alone(alone.init(weights(*columns)), X)
        assert torch.equal(metrics.loss, wanted.loss)
        assert optree.tree_all(optree.tree_map(torch.equal, train.whole(after), alone.whole(want)))


def test_whole_parameters_that_look_like_shards_of_others() -> None:
    train = step("sgd", "zero 3")
    for rows in (8, 4, 2):  # two ranks' shards of the first have the second's shapes
        x = torch.ones(4, rows, dtype=torch.float64)
        params = {"w": torch.ones(rows, 2, dtype=torch.float64)}
        state, metrics = train(train.init(params), x)
        assert torch.equal(metrics.loss, loss(params, x))
        assert {part.shape[0] for part in state.handles[0]} == {-(-rows // 2)}


def test_constants_among_the_parameters_are_not_mixed_up() -> None:
    train = fp.train_step(lambda p, x: (x @ p["w"]).mean() * p["factor"], OPTIMIZERS["sgd"], DATA, PLANS["data"])
    params = {"w": torch.ones(4, 2, dtype=torch.float64)}
    losses = [train(train.init({**params, "factor": factor}), X)[1].loss for factor in (1, 2, 1)]
    assert losses[1] == 2 * losses[0] and losses[2] == losses[0]


USES = {
    "step": lambda train, state: train(state, X),
    "whole": lambda train, state: train.whole(state),
    "params": lambda train, state: train.params(state),
    "copy": lambda train, state: train.copy(state),
    "check": lambda train, state: train.check(state),
    "lower": lambda train, state: train.lower(state, X),
}


@pytest.mark.parametrize("use", USES)
def test_a_state_of_another_step_is_refused(use: str) -> None:
    theirs, ours = step("sgd", "zero 3"), step("sgd", "data")
    state = theirs.init(weights(4))
    with pytest.raises(ValueError, match=r"not made by this train_step, which has made none yet: begin with"):
        USES[use](ours, state)
    ours.init(weights(4))
    told = r"not made by this train_step; w0 is \(4, 4\) float64 as P\('data'\) in it, \(4, 4\) float64 as P\(\) in"
    with pytest.raises(ValueError, match=told + r".*train\.load\(state\)"):
        USES[use](ours, state)
    ours(ours.load(*theirs.whole(state), state.step), X)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (fp.train_step(loss, OPTIMIZERS["sgd"], Mesh(data=4), PLANS["data"]), r"it lies on Mesh\(data=4\), the step's"),
        (step("adamw"), "it has an optimizer state AdamWState"),
        (step("sgd", "flat"), "put into other vectors for the update"),
    ],
)
def test_what_differs_in_another_steps_state_is_said(other: Any, told: str) -> None:
    train, state = step("sgd"), other.init(weights(4))
    train.init(weights(4))
    with pytest.raises(ValueError, match=told):
        train(state, X)


def test_vectors_in_another_order_are_told_apart() -> None:
    def flat(decay: dict[str, float]) -> Any:
        optimizer = fp.optim.adamw(0.1, weight_decay=0.1, decay=decay)
        return fp.train_step(loss, optimizer, DATA, PLANS["flat"])

    ours, theirs = flat({"w0": 0.5, "w1": 0.5, "w2": 1.0}), flat({"w0": 0.5, "w1": 1.0, "w2": 0.5})
    ours.init(weights(4, 4, 4))
    with pytest.raises(ValueError, match="put into other vectors"):
        ours(theirs.init(weights(4, 4, 4)), X)


@pytest.mark.parametrize("donate", [True, False])
def test_a_state_of_an_equal_step_is_taken(donate: bool) -> None:
    ours, theirs = step("adamw", "zero 3"), step("adamw", "zero 3", donate=donate)
    ours.init(weights(3))
    state, _ = ours(theirs.init(weights(3)), X)
    again, _ = theirs(state, X)
    assert again.step == 2


@pytest.mark.parametrize("use", sorted(set(USES) - {"lower"}))  # which takes parameters too
def test_parameters_in_the_place_of_a_state(use: str) -> None:
    with pytest.raises(TypeError, match=r"takes a TrainState, not dict: .*train\.init\(params\).*train\.load\("):
        USES[use](step(), weights(4))


def test_the_step_is_a_number() -> None:
    train = fp.train_step(lambda w, x: (w * x).sum(), fp.optim.adamw(0.1), Mesh(data=2), fp.zero(1, "data"), seed=0)
    saved = train.whole(train.init(torch.ones(2)))
    loaded = train.load(*saved, torch.tensor(3))  # type: ignore[arg-type]
    assert loaded.step == 3 and type(loaded.step) is int
    for wrong in (-1, "3", 3.5, True, None):
        with pytest.raises(ValueError, match=r"step=.* give the number of steps done"):
            train.load(*saved, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrap",
    [lambda w: w.numpy(), lambda w: iter([w]), lambda w: torch.nn.Linear(2, 2)],
    ids=["array", "iterator", "module"],
)
def test_what_is_no_pytree_of_parameters(wrap: Any) -> None:
    """An iterator, as `module.parameters()`, was a constant that steps went on without."""
    train = step()
    state = train.whole(train.init(weights(2)))[1]
    for take in (train.init, lambda params: train.load(params, state, 0)):
        with pytest.raises(
            TypeError, match=r"takes parameters, a pytree of tensors, and found \w+: of a module, `fn, params"
        ):
            take(wrap(torch.ones(4, 2)))


def test_parameters_and_states_without_values() -> None:
    """A state that is made inside torch.device("meta") has values: it is where the parameters are."""
    train = step()
    given = weights(2)
    with torch.device("meta"):
        state = train.init(given)
    leaves = zip(*map(optree.tree_leaves, (train.whole(state), train.whole(train.init(given)))), strict=True)
    assert all(torch.equal(one, other) for one, other in leaves)
    nowhere = {name: weight.to("meta") for name, weight in weights(1, 2).items()}
    with pytest.raises(ValueError, match=r"and params\['w0'\], params\['w1'\], .*train\.lower\(params, batch\)"):
        train.init(nowhere)


# -----------------------------------------------------------------------------
# What is written into files
# -----------------------------------------------------------------------------


def test_a_state_itself_is_not_written(tmp_path: Path) -> None:
    """Rank 0's parts, read on every rank, were taken for theirs."""
    train = step(plan="zero 3")
    state = train.init(weights(2))
    for write in (
        lambda: torch.save(state, tmp_path / "state.pt"),
        lambda: pickle.dumps(state),
        lambda: copy.copy(state),
    ):
        with pytest.raises(TypeError, match=r"its rank's parts alone: save \(\*train\.whole\(state\), state\.step\)"):
            write()


def test_a_state_is_copied_with_what_holds_it() -> None:
    train = step(plan="zero 3")
    state = train.init(weights(2))
    kept = copy.deepcopy({"best": state})["best"]
    after, _ = train(state, X)
    again, _ = train(kept, X)
    assert torch.equal(train.params(after)["w0"], train.params(again)["w0"])


def test_metrics_are_read_from_a_file(tmp_path: Path) -> None:
    train = step()
    _, metrics = train(train.init(weights(2)), X)
    torch.save([metrics], tmp_path / "metrics.pt")
    assert torch.load(tmp_path / "metrics.pt")[0].loss == metrics.loss
