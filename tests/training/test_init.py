"""Parameters made by a function: the same as if it had been called, and one leaf after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import functional_parallel as fp
from functional_parallel.errors import InputMismatchError
from functional_parallel.testing.tracker import tracked
from sharding_specs import Mesh, P

from ..processes import run_on_processes

Params = dict[str, Any]


def by_hand() -> Params:
    w1 = torch.empty(40, 48)
    nn.init.trunc_normal_(w1, std=1.0, a=-1.0, b=1.0)
    return {"w1": w1, "w2": 0.02 * torch.randn(48, 40), "b": torch.zeros(48), "name": "by hand"}


def module() -> Params:
    layers = nn.Sequential(nn.Linear(40, 48), nn.Linear(48, 40, bias=False)).double()
    named = fp.functional(layers)[1]
    return {"w1": named["0.weight"].T, "w2": named["1.weight"].T, "b": named["0.bias"]}


def seeded() -> Params:
    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        w1 = torch.randn(40, 48)
    w2 = torch.empty(48, 40).uniform_(-0.1, 0.1, generator=generator)
    return {"w1": w1, "w2": w2, "b": torch.randn(48, generator=generator)}


def keyed() -> Params:
    keys = (fp.random.fold_in(fp.random.key(0), index) for index in range(3))
    shapes = {"w1": (40, 48), "w2": (48, 40), "b": (48,)}
    return {name: fp.random.normal(next(keys), torch.empty(shape)) for name, shape in shapes.items()}


def predict(params: Params, x: Tensor) -> Tensor:
    hidden = fp.stage_boundary(torch.tanh(x.to(params["w1"].dtype) @ params["w1"] + params["b"]))
    return hidden @ params["w2"]


def loss(params: Params, x: Tensor) -> Tensor:
    return (predict(params, x) - x).square().mean()


TENSOR = fp.tensor_parallel("tensor", {"w1": P(None, "tensor"), "w2": P("tensor"), "b": P("tensor"), "name": P()})
PLANS: dict[str, tuple[Any, Mesh]] = {
    "none": (None, Mesh(data=1)),
    "zero 3, padded": (fp.zero(3, "data"), Mesh(data=3)),
    "zero 1": (fp.zero(1, "data"), Mesh(data=4)),
    "flat": (fp.zero(2, "data", layout="flat"), Mesh(data=2)),
    "tensor, zero 3": (fp.chain(TENSOR, fp.zero(3, "data")), Mesh(data=2, tensor=2)),
    "pipeline": (fp.chain(fp.zero(3, "data"), fp.pipeline("pipe", microbatches=2)), Mesh(pipe=2, data=2)),
    "float16": (fp.chain(fp.mixed_precision("fp16"), fp.data_parallel("data")), Mesh(data=2)),
}


def step(plan: str) -> Any:
    transform, mesh = PLANS[plan]
    return fp.train_step(loss, fp.optim.adamw(0.1, decay={"b": False}), mesh, transform)


def leaves(value: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(value) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize(
    ("plan", "make"),
    [*((plan, by_hand) for plan in PLANS), *(("tensor, zero 3", make) for make in (module, seeded, keyed))],
)
def test_it_is_what_the_function_returns(plan: str, make: Callable[[], Params]) -> None:
    """Parameters, state and the generator's next number, to the bit; and steps go on from it alike."""
    ends = []
    for given in (make, None):
        torch.manual_seed(0)
        train = step(plan)
        state = train.init(make if given else make())
        drawn, begun = torch.rand(1), train.whole(state)
        state, metrics = train(state, torch.ones(12, 40))
        ends.append([drawn, metrics.loss, *leaves(begun), *leaves(train.whole(state))])
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_layers_of_a_stack() -> None:
    def deep(params: Params, x: Tensor) -> Tensor:
        for layer in range(4):
            x = torch.tanh(x @ params["layers"][layer])
        return x.square().mean()

    def make() -> Params:
        return {"layers": torch.stack([nn.init.orthogonal_(torch.empty(40, 40)) for _ in range(4)])}

    plan = fp.pipeline("pipe", {"layers": P("pipe")}, microbatches=2)
    train = fp.train_step(deep, fp.optim.adamw(0.1), Mesh(pipe=2), plan)
    torch.manual_seed(0)
    state = train.init(make)
    torch.manual_seed(0)
    assert torch.equal(train.params(state)["layers"], make()["layers"])


def test_what_was_given_stays_the_users() -> None:
    """Also where the function returns tensors that were there before, or the same one twice."""
    w = torch.randn(40, 40)
    train = fp.train_step(
        lambda p, x: (x @ p["a"] @ p["b"]).mean(), fp.optim.sgd(0.5), Mesh(data=2), fp.zero(3, "data")
    )
    state, before = train.init(lambda: {"a": w, "b": w}), w.clone()
    state, _ = train(state, torch.ones(2, 40))
    assert torch.equal(w, before)
    after = train.params(state)
    assert not torch.equal(after["a"], w) and not torch.equal(after["a"], after["b"])


def test_a_function_that_looks_at_values_says_that_it_ran_whole() -> None:
    def make() -> Params:
        w = torch.randn(40, 40)
        return {"w": w / w.norm().item()}

    train = fp.train_step(lambda p, x: (x @ p["w"]).mean(), fp.optim.sgd(0.5), Mesh(data=2), fp.zero(3, "data"))
    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match=r"whole first state, because aten._local_scalar_dense.default looks at"):
        state = train.init(make)
    torch.manual_seed(0)
    assert torch.equal(train.params(state)["w"], make()["w"])


def test_its_own_error_is_raised() -> None:
    def make() -> Params:
        raise KeyError("no such file")

    with pytest.raises(KeyError, match="no such file"):
        step("zero 1").init(make)
    with pytest.raises(TypeError, match="takes parameters, a pytree of tensors, and found Linear"):
        step("zero 1").init(lambda: nn.Linear(2, 2))


# -----------------------------------------------------------------------------
# On processes
# -----------------------------------------------------------------------------

LAYERS = 12


def deep() -> Params:
    torch.manual_seed(0)
    return fp.functional(nn.Sequential(*[nn.Linear(256, 256) for _ in range(LAYERS)]))[1]


def peak_on_a_rank(rank: int) -> list[tuple[int, list[Tensor]]]:
    train = fp.train_step(lambda p, x: x.mean(), fp.optim.adamw(0.1), Mesh(data=2), fp.zero(3, "data"))
    found = []
    for given in (deep, deep()):
        with torch.no_grad(), tracked(optree.tree_leaves(given)) as tracker:
            state = train.init(given)
        found.append((tracker.peak, leaves(train.params(state))))
        del state
    return found


def test_no_rank_holds_a_model() -> None:
    """Its shards of parameters and moments, and one whole leaf; beside that whole parameters, if they are given."""
    leaf, model = 256 * 256 * 4, LAYERS * (256 * 256 + 256) * 4
    for (peak, params), (beside, expected) in run_on_processes(peak_on_a_rank, 2):
        assert peak <= 3 * model / 2 + 1.1 * leaf
        assert beside <= 3 * model / 2 + model + 1.1 * leaf
        assert all(map(torch.equal, params, expected))


def through(params: Params, x: Tensor) -> Tensor:
    for layer in range(LAYERS):
        x = torch.tanh(x @ params[f"{layer}.weight"].T + params[f"{layer}.bias"])
    return x.square().mean()


def pipelined_on_a_rank(rank: int) -> tuple[int, Any]:
    plan = fp.pipeline("pipe", microbatches=2)
    train = fp.train_step(through, fp.optim.adamw(0.1), Mesh(pipe=2), plan)
    with torch.no_grad(), tracked() as tracker:
        state = train.init(deep, batch=torch.empty(4, 256, device="meta"))
    torch.testing.assert_close(train.params(state), deep(), rtol=0, atol=0)
    return tracker.peak, train(state, torch.ones(4, 256))[1].loss


def test_a_pipeline_that_is_cut_holds_a_ranks_own_stages() -> None:
    leaf, model = 256 * 256 * 4, LAYERS * (256 * 256 + 256) * 4
    expected = through(deep(), torch.ones(4, 256))
    for peak, loss in run_on_processes(pipelined_on_a_rank, 2):
        assert peak <= 3 * model / 2 + 3 * leaf  # stages need not have one number of layers
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("is_lowered", [False, True])
def test_what_ranks_hold_does_not_depend_on_what_was_lowered(is_lowered: bool, tmp_path: Path) -> None:
    """Of a first state, a loaded, a moved and a restored one: all leaves, or with a batch those of the stages."""

    def step() -> Any:
        train = fp.train_step(through, fp.optim.adamw(0.1), Mesh(pipe=2), fp.pipeline("pipe", microbatches=2))
        if is_lowered:
            train.lower(deep(), torch.ones(4, 256))
        return train

    train, x = step(), torch.empty(4, 256, device="meta")
    first = train.init(deep(), batch=x)
    train.lower(first, torch.ones(4, 256))  # the checkpoint has the shapes of the batch
    train.save(first, tmp_path)
    full = [step().init(deep()), step().load(*train.whole(first), 0), step().load(first), step().restore(tmp_path)]
    assert [{handle.holders for handle in state.handles} for state in full] == [{None}] * 4
    cut = [
        first,
        step().load(*train.whole(first), 0, batch=(x,)),
        step().load(first, batch=x),
        step().restore(tmp_path, batch=x),
        step().restore(tmp_path, batch="saved"),
    ]
    for state in cut:
        holders = [handle.holders for handle in state.handles]
        assert set(holders) == {frozenset({0}), frozenset({1}), frozenset({0, 1})}  # the count of steps is on both
        assert holders == [handle.holders for handle in first.handles]


def test_a_checkpoint_without_a_batch_does_not_say_where_leaves_are(tmp_path: Path) -> None:
    train = fp.train_step(through, fp.optim.sgd(0.1), Mesh(pipe=2), fp.pipeline("pipe", microbatches=2))
    train.save(train.init(deep()), tmp_path)
    with pytest.raises(fp.errors.CheckpointError, match=r"does not have the shapes of a batch.*batch=batch"):
        train.restore(tmp_path, batch="saved")


def different(rank: int, cases: list[str]) -> list[str]:
    def make(what: str) -> Params:
        torch.manual_seed(rank if what == "values" else 0)
        params = {"w1": torch.randn(40 + (rank if what == "shapes" else 0), 40), "w2": torch.randn(40, 40)}
        return params | ({"w3": torch.randn(40, 40)} if what == "trees" and rank else {})

    train = fp.train_step(lambda p, x: x.mean(), fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"))
    messages = []
    for case in cases:
        with pytest.raises(InputMismatchError) as found:
            train.init(partial(make, case))
        messages.append(str(found.value))
    return messages


def test_ranks_that_make_different_ones_are_told() -> None:
    for rank, (values, shapes, trees) in enumerate(run_on_processes(different, 2, ["values", "shapes", "trees"])):
        assert "ranks passed different w1, w2. Where they are drawn, seed alike" in values
        assert "ranks passed different w1. Where they are drawn, seed alike" in shapes
        lacks = "rank 0 (data=0) has no w3"
        assert f"train_step.init takes one tree, the same on every rank, but {lacks}" in trees, rank
