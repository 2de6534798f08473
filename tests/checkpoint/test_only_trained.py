"""Checkpoints of the trained parameters alone, as of adapters, and their restoring onto a base."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import CheckpointError
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from .runs import averaged, same

ADAPTERS = {"*/lora": fp.optim.adamw(0.1), "head": fp.optim.sgd(0.1, momentum=0.9), "*": None}
_PIPE = fp.pipeline("pipe", {"layers/*": P("pipe")}, microbatches=2)
_TENSOR = fp.tensor_parallel("tensor", {"*/base": P(None, None, "tensor")})
PLANS: dict[str, tuple[Mesh, Any]] = {
    "zero 3, padded": (Mesh(data=3), fp.zero(3, "data")),
    "flat": (Mesh(data=2), fp.zero(1, "data", layout="flat")),
    "masters, tensor": (Mesh(data=2, tensor=2), fp.chain(fp.mixed_precision("bf16"), _TENSOR, fp.zero(2, "data"))),
    "flat masters": (Mesh(data=2), fp.chain(fp.mixed_precision("bf16"), fp.zero(1, "data", layout="flat"))),
    "pipeline": (Mesh(pipe=2), _PIPE),
}
X = torch.ones(12, 4)
FROZEN = {"params/layers/base", "params/table"}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    for base, lora in zip(p["layers"]["base"], p["layers"]["lora"], strict=True):
        x = torch.tanh(x @ base + x @ lora)
    return (x[:, p["table"]] @ p["head"]).square().mean()


def params(value: float = 0.5) -> Any:
    layers = {"base": torch.full((2, 4, 4), value), "lora": torch.zeros(2, 4, 4)}
    return {"layers": layers, "head": torch.ones(4, 2), "table": torch.tensor([3, 2, 1, 0])}


def step(name: str, optimizer: Any = None, **options: Any) -> Any:
    mesh, plan = PLANS[name]
    return fp.train_step(loss, optimizer or fp.optim.by_path(ADAPTERS), mesh, plan, **options)


@pytest.mark.parametrize("name", PLANS)
def test_the_base_is_not_saved_and_comes_from_like(name: str, tmp_path: Path) -> None:
    train = step(name, donate=False)
    state, _ = train(train.init(params()), X)
    train.save(state, tmp_path, only="trained")
    info = fp.checkpoint.inspect(tmp_path)
    info.verify()
    assert set(info.left_out) == FROZEN and not FROZEN & set(info.leaves)
    assert info.left_out["params/layers/base"].shape == (2, 4, 4) and "params/layers/lora" in info.leaves
    assert re.search(r"params/layers/base +\(2, 4, 4\) +frozen, left out", str(info))
    whole, after = train.whole(state), train.whole(train(state, X)[0])
    for other in PLANS:
        on = step(other)
        for like in (params(), params, fp.Sharded.of(params(), Mesh(data=2), P())):  # values, a function, or sharded
            restored = on.restore(tmp_path, like=like)
            assert same(whole, on.whole(restored))
        if other == name:
            assert same(after, on.whole(on(restored, X)[0]))
    on = step("flat")
    assert (on.params(on.restore(tmp_path, like=params(0.25)))["layers"]["base"] == 0.25).all()


def test_it_is_smaller_by_the_base(tmp_path: Path) -> None:
    train = step("flat")
    state = train.init(params())
    sizes = []
    for only in (None, "trained"):
        train.save(state, tmp_path / str(only), only=only)
        sizes.append(sum(each.stat().st_size for each in (tmp_path / str(only)).rglob("params/*")))
    base = sum(leaf.nbytes for leaf in (params()["layers"]["base"], params()["table"]))
    assert sizes[0] - sizes[1] > base


def test_leaves_that_are_missing_are_named(tmp_path: Path) -> None:
    train = step("flat")
    train.save(train.init(params()), tmp_path, only="trained")
    missing = r"saved with only='trained', without these frozen parameters: layers/base, table. Give train.restore"
    meta = optree.tree_map(lambda leaf: leaf.to("meta"), params())
    for options in ({}, {"like": meta}, {"like": meta, "partial": True}):
        with pytest.raises(CheckpointError, match=missing):
            step("zero 3, padded").restore(tmp_path, **options)
    other = params() | {"table": torch.tensor([0, 1])}
    with pytest.raises(CheckpointError, match=r"params 'table': \(4,\) in the checkpoint, \(2,\) in this step"):
        step("flat").restore(tmp_path, like=other)
    with pytest.raises(CheckpointError, match=r"optimizer 'mean/layers/base': the checkpoint does not have it"):
        step("flat", fp.optim.adamw(0.1)).restore(tmp_path, like=params())
    with pytest.raises(ValueError, match=r"only='all': it is 'trained'"):
        train.save(train.init(params()), tmp_path, only="all")
    with pytest.raises(ValueError, match=r"only='all'"):
        fp.checkpoint.Saver(tmp_path, only="all")


def test_a_frozen_leaf_may_be_renamed(tmp_path: Path) -> None:
    def of(name: str) -> Any:
        of_two = lambda p, x: (x @ p[name] @ p["w"]).square().mean()  # noqa: E731
        optimizer = fp.optim.by_path({"w": fp.optim.adamw(0.1), "*": None})
        return fp.train_step(of_two, optimizer, Mesh(data=2), fp.zero(3, "data"))

    given = {"base": torch.ones(4, 4), "w": torch.ones(4)}
    train = of("base")
    train.save(train.init(given), tmp_path, only="trained")
    like = {"core": torch.full((4, 4), 2.0), "w": torch.empty(4)}
    other = of("core")
    found = other.params(other.restore(tmp_path, like=like, rename={"base": "core"}))
    assert torch.equal(found["core"], like["core"]) and torch.equal(found["w"], given["w"])
    with pytest.raises(CheckpointError, match="without these frozen parameters: base"):
        other.restore(tmp_path, like=like)


def test_load_and_consolidate_have_what_was_saved(tmp_path: Path) -> None:
    train = step("zero 3, padded")
    with fp.checkpoint.Saver(tmp_path, only="trained") as saver:
        saver(train, train.init(params()))
    found = fp.checkpoint.load(tmp_path)
    assert set(found) == {"layers", "head"} and set(found["layers"]) == {"lora"}
    (model, *_) = fp.checkpoint.consolidate(tmp_path, tmp_path / "full")
    assert set(fp.checkpoint.load(model)) == {"layers/lora", "head"}


def test_lists_have_none_in_place_of_what_was_left_out(tmp_path: Path) -> None:
    def of_list(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p[0] @ p[1]["w"]).square().mean()

    optimizer = fp.optim.by_path({"0": None, "*": fp.optim.sgd(0.1)})
    train = fp.train_step(of_list, optimizer, Mesh(data=2), fp.zero(3, "data"))
    train.save(train.init([torch.ones(4, 4), {"w": torch.ones(4)}]), tmp_path, only="trained")
    base, trained = fp.checkpoint.load(tmp_path)
    assert base is None and torch.equal(trained["w"], torch.ones(4))


def test_parameters_without_a_path_to_the_loss_are_saved(tmp_path: Path) -> None:
    train = fp.train_step(lambda p, x: (x @ p["w"]).mean(), fp.optim.adamw(0.1), Mesh(data=2), fp.zero(3, "data"))
    with pytest.warns(fp.errors.NotTrainedWarning):
        state, _ = train(train.init({"w": torch.ones(4), "unused": torch.ones(3)}), X[:2])
    train.save(state, tmp_path, only="trained")
    assert fp.checkpoint.inspect(tmp_path).left_out == {} and train.restore(tmp_path).step == 1


def test_an_average_of_frozen_parameters_is_left_out(tmp_path: Path) -> None:
    optimizer = averaged(fp.optim.by_path({"w": fp.optim.sgd(0.1), "*": None}))
    of_two = lambda p, x: (x @ p["base"] @ p["w"]).square().mean()  # noqa: E731
    train = fp.train_step(of_two, optimizer, Mesh(data=2), fp.zero(3, "data"), donate=False)
    given = {"base": torch.ones(4, 4), "w": torch.ones(4)}
    state, _ = train(train.init(given), X[:2])
    train.save(state, tmp_path, only="trained")
    info = fp.checkpoint.inspect(tmp_path)
    assert set(info.left_out) == {"params/base", "optimizer/average/base"} and "optimizer/average/w" in info.leaves
    assert same(train.whole(state), train.whole(train.restore(tmp_path, like=given)))


def on_a_rank(rank: int, folder: str) -> bool:
    mesh = Mesh(data=2)
    train, wider = (
        fp.train_step(loss, fp.optim.by_path(ADAPTERS), mesh, plan, reduction="ordered", donate=False)
        for plan in (fp.zero(3, "data"), fp.zero(1, "data", layout="flat"))
    )
    state, _ = train(train.init(params), X)
    train.save(state, folder, only="trained")
    return same(train.whole(state), wider.whole(wider.restore(folder, like=params)))


def test_processes(tmp_path: Path) -> None:
    assert run_on_processes(on_a_rank, 2, str(tmp_path)) == [True, True]
    assert set(fp.checkpoint.inspect(tmp_path).left_out) == FROZEN
