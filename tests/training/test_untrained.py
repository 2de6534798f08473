"""Parameters without a path to the loss: not updated, reported, and refused if there are no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from ..trees import assert_close

OPTIMIZERS: dict[str, tuple[Any, Callable[..., torch.optim.Optimizer] | None]] = {
    "adamw": (fp.optim.adamw(1e-2, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1)),
    "adam": (fp.optim.adam(1e-2, weight_decay=0.1), lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1)),
    "sgd": (
        fp.optim.sgd(1e-2, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.1),
    ),
    "adafactor": (
        fp.optim.adafactor(1e-2, weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p, 1e-2, weight_decay=0.1, foreach=False),
    ),
    "lion": (fp.optim.lion(1e-2, weight_decay=0.1), None),
    "clipped": (fp.optim.clip_value(fp.optim.adamw(1e-2, weight_decay=0.1), 1e6), None),
}


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    """It uses no "unused"; "cut" and "aux" only without derivatives."""
    for w in params["layers"]:
        x = torch.tanh(x @ w)
    return (x * params["cut"].detach()).square().mean()


def parameters() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {"cut": draw(4), "layers": [draw(4, 4) for _ in range(4)], "unused": draw(3, 4), "number": 2}


def inputs() -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp.NotTrainedWarning)
        yield


def trained(optimizer: Any, mesh: Mesh, plan: Any, clip: float | None = None) -> tuple[Any, Any, list[torch.Tensor]]:
    """Whole parameters, whole state and gradient norms of three steps, with decayed momenta from the start."""
    train = fp.train_step(loss, optimizer, mesh, plan, clip=clip)
    params = parameters()
    begun = optree.tree_map(
        lambda leaf: leaf + 0.25 if isinstance(leaf, torch.Tensor) else leaf, optimizer.init(params)
    )
    state, norms = train.load(params, begun, 0), []
    for _ in range(3):
        state, metrics = train(state, inputs())
        norms.append(metrics.grad_norm)
    return *train.whole(state), norms


SPLIT = fp.tensor_parallel("tensor", {"layers/0": P(None, "tensor"), "unused": P(None, "tensor")})
WHERE = {
    "zero 0, microbatches": (Mesh(data=2), fp.chain(fp.zero(0, "data"), fp.accumulate(2))),
    "zero 1, tensor": (Mesh(data=2, tensor=2), fp.chain(SPLIT, fp.zero(1, "data"))),
    "flat, tensor": (Mesh(data=2, tensor=2), fp.chain(SPLIT, fp.zero(2, "data", layout="flat"))),
    "flat twice, microbatches": (
        Mesh(shard=2, data=2),
        fp.chain(fp.zero(1, "shard", layout="flat"), fp.zero(2, "data", layout="flat"), fp.accumulate(2)),
    ),
    "zero 3, tensor": (Mesh(data=2, tensor=2), fp.chain(SPLIT, fp.zero(3, "data"), fp.accumulate(2))),
    "zero 3 and 1": (Mesh(shard=2, data=2), fp.chain(fp.zero(3, "shard"), fp.zero(1, "data"))),
    "pipeline": (Mesh(data=2, pipe=2), fp.chain(fp.zero(2, "data"), fp.pipeline("pipe", microbatches=2))),
}
RUNS = [
    *((name, "zero 0, microbatches") for name in ("lion", "adafactor")),
    *((name, "zero 1, tensor") for name in ("sgd", "clipped")),
    *((name, "flat, tensor") for name in ("adam", "sgd")),
    ("adamw", "flat twice, microbatches"),
    *((name, "zero 3, tensor") for name in ("adafactor", "adam")),
    ("adamw", "zero 3 and 1"),
    *((name, "pipeline") for name in ("adamw", "sgd")),
]


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(("name", "where"), RUNS)
@pytest.mark.every(3)
def test_no_plan_updates_them(name: str, where: str) -> None:
    optimizer, clip = OPTIMIZERS[name][0], 0.01 if name == "adamw" else None
    params, state, norms = trained(optimizer, *WHERE[where], clip)
    assert_close((params, state, norms), trained(optimizer, Mesh(), None, clip))
    before = parameters()
    begun = optree.tree_leaves(optimizer.init(before))
    for path, leaf, first in zip(optree.tree_paths(state), optree.tree_leaves(state), begun, strict=True):
        if {"unused", "cut"} & set(path):
            assert torch.equal(leaf, first + 0.25), path
    assert torch.equal(params["unused"], before["unused"])
    assert torch.equal(params["cut"], before["cut"])
    assert not torch.equal(params["layers"][0], before["layers"][0])


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("plan", [None, fp.zero(1, "data")])
def test_a_state_whose_containers_are_those_of_the_parameters(plan: Any) -> None:
    """Two moments in a list, of two parameters in a list: the first moment is not that of the first parameter."""

    def init(params: list[torch.Tensor]) -> list[Any]:
        return [optree.tree_map(torch.zeros_like, params) for _ in range(2)]

    def update(grads: Any, state: Any, params: Any) -> Any:
        state = [optree.tree_map(lambda m, g, by=by: m + by * g, each, grads) for by, each in enumerate(state, 1)]
        return optree.tree_map(lambda p, m: p - 0.5 * m, params, state[0]), state

    optimizer = fp.optim.Optimizer(init, update, elementwise=True)
    train = fp.train_step(lambda p, x: (x @ p[1]).sum(), optimizer, Mesh(data=2), plan)
    state, _ = train(train.init([torch.ones(3), torch.ones(4)]), torch.ones(2, 4))
    params, moments = train.whole(state)
    assert [each.tolist() for each in params] == [[1.0] * 3, [0.0] * 4]
    assert [[each.tolist() for each in of_one] for of_one in moments] == [
        [[0.0] * 3, [2.0] * 4],
        [[0.0] * 3, [4.0] * 4],
    ]


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("name", [name for name, (_, of_torch) in OPTIMIZERS.items() if of_torch is not None])
def test_the_step_is_that_of_torch(name: str) -> None:
    optimizer, of_torch = OPTIMIZERS[name]
    assert of_torch is not None
    train = fp.train_step(loss, optimizer, Mesh(data=2), fp.zero(2, "data"))
    state, wanted = train.init(parameters()), parameters()
    leaves = [leaf.requires_grad_() for leaf in optree.tree_leaves(wanted) if isinstance(leaf, torch.Tensor)]
    reference = of_torch(leaves)
    for _ in range(3):
        state, _ = train(state, inputs())
        reference.zero_grad()
        loss(wanted, inputs()).backward()
        reference.step()
    found = [leaf for leaf in optree.tree_leaves(train.params(state)) if isinstance(leaf, torch.Tensor)]
    assert_close(found, [leaf.detach() for leaf in leaves])


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("layout", ["dims", "flat"])
def test_an_optimizer_of_ones_own(layout: str) -> None:
    """It is given zeros; the parameter and the state of its shape stay, and a count of steps goes on."""

    def init(params: Any) -> Any:
        return {"count": torch.zeros(()), "mean": optree.tree_map(torch.zeros_like, params)}

    def update(grads: Any, state: Any, params: Any, constants: Any = None) -> Any:
        mean = optree.tree_map(lambda m, g, p: m + g + 0.1 * p, state["mean"], grads, params)
        new = optree.tree_map(lambda p, m: p - 0.1 * m, params, mean)
        return new, {"count": state["count"] + 1, "mean": mean}

    optimizer = fp.optim.Optimizer(init, update, constants=lambda params: 0)
    params = {key: value for key, value in parameters().items() if key != "number"}
    train = fp.train_step(loss, optimizer, Mesh(data=2), fp.zero(1, "data", layout=layout))
    state, _ = train(train.init(params), inputs())
    new, held = train.whole(state)
    assert torch.equal(new["unused"], params["unused"])
    assert not held["mean"]["unused"].any()
    assert held["mean"]["layers"][3].any()
    assert held["count"] == 1


# -----------------------------------------------------------------------------
# Reports
# -----------------------------------------------------------------------------

NET = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
OUTSIDE = {"scale": [torch.ones(4, requires_grad=True)]}
PLANS = {
    "no plan": (Mesh(), None),
    "zero 3": (Mesh(data=2), fp.zero(3, "data")),
    "flat, microbatches": (Mesh(data=2), fp.chain(fp.zero(2, "data", layout="flat"), fp.accumulate(2))),
    "pipeline": (Mesh(pipe=2, data=2), fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2))),
}


def step(f: Any, plan: str, params: Any = None) -> Any:
    train = fp.train_step(f, fp.optim.sgd(0.1), *PLANS[plan])
    state, _ = train(
        train.init({"w": torch.ones(4, 4), "v": torch.ones(4, 4)} if params is None else params), inputs32()
    )
    return train, state


def inputs32() -> torch.Tensor:
    return torch.ones(8, 4)


@pytest.mark.parametrize("plan", PLANS)
def test_unused_ones_are_named_once(plan: str) -> None:
    def uses_one(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ params["w"]) @ params["w"]).sum()

    with pytest.warns(fp.NotTrainedWarning, match=r"^train_step: no gradient reaches `v`: the loss `uses_one`") as seen:
        train, state = step(uses_one, plan)
    assert [warning.filename for warning in seen] == [__file__]
    state, _ = train(state, torch.ones(16, 4))  # another program
    assert "no gradient reaches v" in str(train.explain())
    train.explain(group="pass")  # traces again


@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_that_trains_nothing_is_refused(plan: str) -> None:
    def detached(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"].detach() + params["v"].argmax()).sum()

    def closed(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (NET(x) * OUTSIDE["scale"][0]).sum()

    with pytest.raises(
        fp.NothingToTrainError, match=r"any of the parameters \(`v`, `w`\).*`detached` does not use them"
    ):
        step(detached, plan)
    with pytest.raises(fp.NothingToTrainError, match=r"`closed` closes over tensors that require gradients") as found:
        step(closed, plan)
    for name in (r"`NET.0.weight` of shape (4, 4)", r"`NET.0.bias`", r"`OUTSIDE['scale/0']`", "fp.functional(module)"):
        assert name in str(found.value)
    assert str(found.value).count("used at test_untrained.py:") == 3


@pytest.mark.parametrize("plan", PLANS)
def test_closed_over_tensors_are_named(plan: str) -> None:
    outer = torch.ones(4, requires_grad=True)

    def adapter(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(NET(x) @ params["w"] * outer @ params["v"]).sum()

    def frozen(params: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            h = NET(x)
        return torch.tanh(h @ params["w"] * outer.detach() @ params["v"]).sum()

    with pytest.warns(fp.NotTrainedWarning, match=r"`adapter` closes over") as seen:
        train, state = step(adapter, plan)
    assert len(seen) == 1
    text = str(seen[0].message)
    assert all(name in text for name in ("`NET.0.weight`", "`NET.0.bias`", "`outer` of shape (4,), used at test_"))
    train(state, torch.ones(16, 4))
    step(frozen, plan)


def test_the_attributes_of_an_object() -> None:
    class Model:
        def __init__(self) -> None:
            self.net = torch.nn.Linear(4, 4)

        def loss(self, params: Any, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).sum() * params["w"].sum()

    with pytest.warns(fp.NotTrainedWarning, match=r"`self\.net\.weight` of shape"):
        step(Model().loss, "no plan", {"w": torch.ones(2)})


def test_gradients_of_a_constant_are_legal() -> None:
    """As in torch.func, whose gradients of what is not used are zeros; `explain` lists it."""
    compiled = fp.compile(fp.grad(fp.zero(3, "data")(lambda p, x: (NET(x) * p["a"]).sum())), Mesh(data=2))
    grads = compiled({"a": torch.ones(4), "b": torch.ones(3)}, torch.ones(2, 4))
    assert not grads["b"].any()
    assert "note: no gradient reaches b" in str(compiled.explain())


def untrained_on_processes(_: int) -> Any:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = trained(OPTIMIZERS["adamw"][0], Mesh(data=2), fp.zero(3, "data"))
    try:
        step(lambda params, x: NET(x).sum(), "zero 3")
    except fp.NothingToTrainError as error:
        return found, [str(each.message) for each in seen], str(error)
    raise AssertionError("not refused")


def test_on_processes() -> None:
    wanted = untrained_on_processes(0)
    assert len(wanted[1]) == 1
    for params, messages, error in run_on_processes(untrained_on_processes, 2):
        assert_close(params, wanted[0])
        assert messages == wanted[1]
        assert error == wanted[2]
