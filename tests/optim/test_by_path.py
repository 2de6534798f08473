"""Optimizers by path: each parameter has the update of its own optimizer, under every plan."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P, optional

from ..processes import run_on_processes

Params = dict[str, Any]


def params() -> Params:
    torch.manual_seed(0)
    layers = [{"norm": torch.randn(6), "w": torch.randn(6, 6)} for _ in range(4)]
    return {"embed": torch.randn(5, 6), "layers": layers, "head": torch.randn(6, 2)}


def batch() -> torch.Tensor:
    return torch.randint(0, 5, (8,), generator=torch.Generator().manual_seed(1))


def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    h = params["embed"][x]
    for layer in params["layers"]:
        h = h + torch.tanh((h * layer["norm"]) @ layer["w"])
    return (h @ params["head"]).square().mean()


def groups() -> dict[str, fp.optim.Optimizer | None]:
    return {
        "*norm*": fp.optim.sgd(0.05, momentum=0.9),
        "embed": None,
        "head": fp.optim.lion(1e-3, weight_decay=0.5),
        "*": fp.optim.adamw(fp.optim.schedules.linear(1e-2, 1e-3, 4), weight_decay=0.1),
    }


def by_torch(steps: int = 3, clip: float | None = None) -> tuple[Params, list[float]]:
    """The same in torch. The head's optimizer, which torch lacks, is written out."""
    tree = params()
    for leaf in (tree["head"], *(leaf for layer in tree["layers"] for leaf in layer.values())):
        leaf.requires_grad_()
    norms, weights = ([layer[name] for layer in tree["layers"]] for name in ("norm", "w"))
    sgd = torch.optim.SGD(norms, lr=0.05, momentum=0.9)
    adamw = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(adamw, 1.0, 0.1, total_iters=4)
    moment, losses = torch.zeros_like(tree["head"]), []
    for _ in range(steps):
        value = loss(tree, batch())
        value.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([tree["head"], *norms, *weights], clip)
        sgd.step(), adamw.step(), schedule.step()
        with torch.no_grad():
            head, gradient = tree["head"], tree["head"].grad
            head.mul_(1 - 1e-3 * 0.5).sub_(1e-3 * (0.9 * moment + 0.1 * gradient).sign())
            moment.mul_(0.99).add_(0.01 * gradient)
            head.grad = None
        sgd.zero_grad(), adamw.zero_grad()
        losses.append(value.item())
    return tree, losses


def steps(plan: Any, mesh: Mesh, count: int = 3, **options: Any) -> tuple[Params, list[float], Any]:
    train = fp.train_step(loss, fp.optim.by_path(groups()), mesh, plan, reduction="ordered", **options)
    state, losses = train.init(params()), []
    for _ in range(count):
        state, metrics = train(state, batch())
        losses.append(metrics.loss.item())
    return train.params(state), losses, metrics


def flat(tree: Params) -> list[torch.Tensor]:
    return [tree["embed"], tree["head"], *(leaf for layer in tree["layers"] for leaf in layer.values())]


def test_a_pattern_that_may_match_nothing_matches_nothing() -> None:
    groups = {optional("*bias*"): fp.optim.adamw(0.1), "*": fp.optim.sgd(0.1)}
    train = fp.train_step(loss, fp.optim.by_path(groups), Mesh(data=2), fp.zero(1, "data"))
    state, _ = train(train.init(params()), batch())
    alone = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(1, "data"))
    other, _ = alone(alone.init(params()), batch())
    assert torch.equal(train.params(state)["head"], alone.params(other)["head"])


@pytest.mark.parametrize("clip", [None, 0.1])
def test_each_group_is_updated_as_by_torch(clip: float | None) -> None:
    want, losses = by_torch(clip=clip)
    got, found, metrics = steps(None, Mesh(), clip=clip)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    for mine, other in zip(flat(got), flat(want), strict=True):
        torch.testing.assert_close(mine, other.detach())
    assert torch.equal(got["embed"], params()["embed"])
    torch.testing.assert_close(metrics.lr["*"].item(), 1e-2 - (1e-2 - 1e-3) * 2 / 4)
    assert metrics.lr["*norm*"].item() == 0.05


TENSOR = fp.tensor_parallel("tensor", {"*/w": P(None, "tensor")})
PLANS = {
    "ddp": (fp.data_parallel("data"), Mesh(data=2)),
    **{f"zero-{stage}": (fp.zero(stage, "data"), Mesh(data=2)) for stage in (1, 2, 3)},
    "flat": (fp.zero(1, "data", layout="flat"), Mesh(data=2)),
    "flat 2": (fp.zero(2, "data", layout="flat"), Mesh(data=4)),
    "tensor, zero-1": (fp.chain(TENSOR, fp.zero(1, "data")), Mesh(data=2, tensor=2)),
    "tensor, flat": (fp.chain(TENSOR, fp.zero(1, "data", layout="flat")), Mesh(data=2, tensor=2)),
    "pipeline": (fp.pipeline("pipe", schedule="1f1b", microbatches=2), Mesh(pipe=2)),
    "pipeline, zero-1": (
        fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", schedule="gpipe", microbatches=2)),
        Mesh(pipe=2, data=2),
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_as_one_device(plan: str) -> None:
    want, losses, _ = steps(None, Mesh(), clip=0.5)
    got, found, _ = steps(*PLANS[plan], clip=0.5)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    for mine, other in zip(flat(got), flat(want), strict=True):
        torch.testing.assert_close(mine, other)


EXACT = [fp.optim.sgd(0.25), fp.optim.sgd(0.25, momentum=0.5), fp.optim.lion(0.25, weight_decay=0.5), None]


@st.composite
def drawn_plans(draw: st.DrawFn) -> tuple[Any, Mesh]:
    """ZeRO at any stage and in either layout, with tensor and pipeline axes or without."""
    sizes = {"data": draw(st.integers(1, 3)), "tensor": draw(st.integers(1, 2)), "pipe": draw(st.integers(1, 2))}
    stage = draw(st.integers(0, 3))
    flat = {"layout": "flat"} if stage in (1, 2) and sizes["pipe"] == 1 and draw(st.booleans()) else {}
    parts = [fp.zero(stage, "data", **flat)]
    if sizes["tensor"] > 1:
        parts.insert(0, fp.tensor_parallel("tensor", {"*/w": P(None, "tensor")}))
    if sizes["pipe"] > 1:
        parts.append(fp.pipeline("pipe", schedule="1f1b", microbatches=draw(st.integers(1, 3))))
    return fp.chain(*parts), Mesh({axis: size for axis, size in sizes.items() if size > 1 or axis == "data"})


def whole_numbers(params: Params, x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = x @ layer["w"] + layer["b"]
    return (x * params["scale"]).sum()


@given(
    drawn_plans(),
    st.lists(st.sampled_from(EXACT), min_size=4, max_size=4).filter(any),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 99),
)
@settings(max_examples=12, deadline=None)
def test_groups_are_those_of_one_device_to_the_bit(plan: Any, chosen: Any, half: int, rows: int, seed: int) -> None:
    """Optimizers by path × ZeRO stage × layout × tensor × pipeline × frozen parts."""
    draw = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=draw).double()

    width = 2 * half
    layers = [{"w": integers(width, width), "b": integers(width)} for _ in range(3)]
    params = {"layers": layers, "scale": integers(width)}
    x, found = integers(3 * rows * plan[1].axis_size("data"), width), []
    optimizer = fp.optim.by_path(dict(zip(("layers/0/*", "*/b", "scale", "*"), chosen, strict=True)))
    for transform, mesh in ((None, Mesh()), plan):
        train = fp.train_step(whole_numbers, optimizer, mesh, transform, clip=None, reduction="ordered")
        state = train.init(params)
        for _ in range(2):
            state, metrics = train(state, x)
        leaves = (*optree.tree_leaves(train.whole(state)), metrics.loss)
        found.append([torch.as_tensor(leaf) for leaf in leaves])  # 0 for a parameter of another group
    assert all(map(torch.equal, *found))


def test_frozen_parameters_have_no_gradient_and_no_state() -> None:
    train = fp.train_step(loss, fp.optim.by_path(groups()), Mesh(data=2), fp.data_parallel("data"))
    program = train.lower(params(), batch())
    assert "embedding_dense_backward" not in str(program) and "index_put" not in str(program)
    _, state = train.whole(train.init(params()))
    assert all(each.mean["embed"] == 0 for pattern, each in state.groups.items() if pattern == "*")
    sizes = {leaf.shape for leaf in torch.utils._pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)}
    assert (5, 6) not in sizes


def test_a_state_is_saved_and_loaded() -> None:
    made = fp.optim.by_path(groups())
    first = fp.train_step(loss, made, Mesh(data=2), fp.zero(1, "data", layout="flat"))
    state, _ = first(first.init(params()), batch())
    second = fp.train_step(loss, made, Mesh(data=4), fp.zero(3, "data"))
    loaded = second.load(*first.whole(state), state.step)
    mine, theirs = first.params(first(state, batch())[0]), second.params(second(loaded, batch())[0])
    for one, other in zip(flat(mine), flat(theirs), strict=True):
        torch.testing.assert_close(one, other)


def test_other_optimizers_in_groups() -> None:
    def signed() -> fp.optim.Optimizer:
        """A user's optimizer, which is not known to be elementwise and has no constants."""
        return fp.optim.Optimizer(
            lambda params: None,
            lambda grads, state, params: ({k: v - 0.01 * grads[k].sign() for k, v in params.items()}, state),
        )

    def normed() -> fp.optim.Optimizer:
        return fp.optim.Optimizer(
            lambda params: None,
            lambda grads, state, params: ({k: v - 0.01 * grads[k] / grads[k].norm() for k, v in params.items()}, state),
        )

    for chosen in (
        {"*/w": fp.optim.adafactor(1e-2), "*": fp.optim.adamw(1e-2)},
        {"*/w": normed(), "*norm*": signed(), "*": fp.optim.adamw(1e-2)},
    ):
        found = []
        for plan, mesh in ((None, Mesh()), (fp.zero(3, "data"), Mesh(data=2)), (fp.zero(1, "data"), Mesh(data=2))):
            train = fp.train_step(loss, fp.optim.by_path(chosen), mesh, plan)
            state = train.init(params())
            for _ in range(2):
                state, _ = train(state, batch())
            found.append(flat(train.params(state)))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0])


def test_what_is_refused() -> None:
    adamw = fp.optim.adamw(1e-3)
    with pytest.raises(ValueError, match=r"no pattern matches head"):
        fp.optim.by_path({"layers/*": adamw, "embed": None}).init(params())
    with pytest.raises(ValueError, match=r"'\*/nrom' is the first match of no parameter: it matches none; the nearest"):
        fp.optim.by_path({"*/nrom": None, "*": adamw}).init(params())
    with pytest.raises(ValueError, match=r"'head' is the first match of no parameter: patterns before it match all"):
        fp.optim.by_path({"*": adamw, "head": None}).init(params())
    with pytest.raises(TypeError, match=r"by_path\('\*': 0.1\): the value is an fp.optim.Optimizer, or None"):
        fp.optim.by_path({"*": 0.1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="nothing to train"):
        fp.optim.by_path({"*": None})
    with pytest.raises(ValueError, match="one tensor"):
        fp.optim.by_path({"*": adamw}).init(torch.ones(2))
    user = fp.optim.Optimizer(lambda params: None, lambda grads, state, params: (params, state))
    with pytest.raises(ValueError, match=r"the optimizer of '\*/w' has `specs`.*'\*' has neither"):
        fp.optim.by_path({"*/w": fp.optim.adafactor(1e-2), "*": user})


def on_processes(rank: int) -> list[float]:
    _, losses, _ = steps(fp.zero(2, "data"), Mesh(data=2), clip=0.5)
    return losses


def test_processes_train_as_simulated_ranks() -> None:
    _, losses, _ = steps(fp.zero(2, "data"), Mesh(data=2), clip=0.5)
    assert run_on_processes(on_processes, 2) == [losses, losses]
