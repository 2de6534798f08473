"""Leaves that are restored in another size: as if the full state had been resized by hand, on every mesh and plan."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.errors import CheckpointError, InputMismatchError
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from .runs import averaged, same

Shape = tuple[int, ...]
_TENSOR = fp.tensor_parallel(
    "tensor", {"embed": P("tensor"), "*/w": P(None, None, "tensor"), "head": P(None, "tensor")}
)
_PIPE = fp.pipeline("pipe", {"layers/*": P("pipe")}, microbatches=2)
PLANS: dict[str, tuple[Mesh, Any, Any]] = {
    "one device": (Mesh(), None, fp.optim.adamw(0.1)),
    "zero 3, padded": (Mesh(data=3), fp.zero(3, "data"), fp.optim.adamw(0.1)),
    "flat": (Mesh(data=4), fp.zero(1, "data", layout="flat"), fp.optim.adamw(0.1)),
    "flat, tensor": (Mesh(data=2, tensor=2), fp.chain(_TENSOR, fp.zero(2, "data", layout="flat")), fp.optim.adamw(0.1)),
    "masters": (Mesh(data=2), fp.chain(fp.mixed_precision("bf16"), fp.zero(1, "data")), fp.optim.adamw(0.1)),
    "flat masters": (
        Mesh(data=2),
        fp.chain(fp.mixed_precision("bf16"), fp.zero(2, "data", layout="flat")),
        fp.optim.adamw(0.1),
    ),
    "pipeline": (Mesh(pipe=2, data=2), fp.chain(fp.zero(3, "data"), _PIPE), fp.optim.adamw(0.1)),
}
FACTORED = {
    name: (mesh, plan, fp.optim.adafactor(0.1))
    for name, (mesh, plan, _) in PLANS.items()
    if "flat" not in name and name != "pipeline"
}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    for w in p["layers"]["w"]:
        x = torch.tanh(x @ w)
    return (x @ p["head"]).square().mean() + p["embed"].sum()


def shapes(vocabulary: int, width: int, layers: int) -> dict[str, Any]:
    return {"embed": (vocabulary, 4), "head": (width, vocabulary), "layers": {"w": (layers, width, width)}}


def params_of(sizes: tuple[int, int, int], device: str = "cpu") -> Any:
    generator = torch.Generator().manual_seed(sum(sizes))
    draw = lambda shape: torch.randint(1, 99, shape, generator=generator).float().to(device)  # noqa: E731
    return optree.tree_map(draw, shapes(*sizes), is_leaf=lambda x: isinstance(x, tuple))


def step(plan: tuple[Mesh, Any, Any]) -> Any:
    mesh, transform, optimizer = plan
    return fp.train_step(loss, optimizer, mesh, transform)


def by_hand(old: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The elements that both have, and zeros."""
    new = torch.zeros(shape, dtype=old.dtype)
    common = tuple(slice(min(pair)) for pair in zip(old.shape, shape, strict=True))
    new[common] = old[common]
    return new


def tiled(old: torch.Tensor, shape: Shape) -> torch.Tensor:
    """A value of its own for each new element."""
    return old.flatten()[:1] + torch.arange(float(torch.Size(shape).numel())).view(shape)


def random_state(train: Any, params: Any) -> Any:
    """A state with another number in every element."""
    numbers = iter(range(1, 10**6, 7))
    state = train.optimizer.init(params)

    def filled(leaf: torch.Tensor) -> torch.Tensor:
        return (torch.arange(leaf.numel()) + next(numbers)).view(leaf.shape).to(leaf.dtype)

    return train.load(params, optree.tree_map(filled, state), 5)


SIZES = st.tuples(st.integers(1, 9), st.integers(1, 6), st.just(4))


@settings(max_examples=15)
@given(data=st.data())
def test_the_state_is_that_of_resizing_by_hand(data: Any) -> None:
    old, new = data.draw(SIZES), data.draw(SIZES)
    tensor = [(8, 4, 4), (4, 2, 4), (6, 6, 4)]  # what tensor parallelism divides
    table = data.draw(st.sampled_from([PLANS, FACTORED]))
    before, after = (data.draw(st.sampled_from(sorted(table))) for _ in range(2))
    old = data.draw(st.sampled_from(tensor)) if "tensor" in before else old
    new = data.draw(st.sampled_from(tensor)) if "tensor" in after else new
    makes = data.draw(st.booleans())
    train, other = step(table[before]), step(table[after])
    state = random_state(train, params_of(old))
    resize = {"embed": tiled if makes else "zeros", "*": "zeros"}
    with tempfile.TemporaryDirectory() as folder:
        train.save(state, folder)
        restored = other.restore(folder, like=params_of(new, "meta"), resize=resize)
    params, optimizer = train.whole(state)
    wanted = params_of(new)
    first = other.optimizer.init(wanted)
    resized = optree.tree_map(lambda leaf, like: by_hand(leaf, like.shape), params, wanted)
    if makes and old[0] != new[0]:
        resized["embed"] = tiled(params["embed"], wanted["embed"].shape)
    moments = optree.tree_map(
        lambda leaf, like: by_hand(leaf, like.shape), getattr(optimizer, "optimizer", optimizer), first
    )
    assert same(other.whole(other.load(resized, moments, 5)), other.whole(restored))
    assert all(map(_equal, restored.handles, other.load(resized, moments, 5).handles))  # masters, stored ones, padding


def _equal(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, list):
        return getattr(ours, "value", None) == getattr(theirs, "value", None)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_vocabulary_that_has_grown_trains_on(tmp_path: Path) -> None:
    def embedded(p: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(ids, p["e"]).square().mean()

    train = fp.train_step(embedded, fp.optim.adamw(0.1), Mesh(data=2), fp.zero(3, "data"))
    state, _ = train(train.init({"e": torch.ones(6, 4)}), torch.arange(6))
    train.save(state, tmp_path)
    with pytest.raises(CheckpointError, match=r"\(6, 4\) in the checkpoint, \(8, 4\) in this step[^$]*resize="):
        train.restore(tmp_path, like={"e": torch.ones(8, 4)})
    mean = lambda old, shape: torch.cat([old, old.mean(0).expand(shape[0] - len(old), -1)])  # noqa: E731
    grown = train.restore(tmp_path, like={"e": torch.empty(8, 4, device="meta")}, resize={"*": mean})
    assert torch.equal(train.params(grown)["e"][:6], train.params(train.restore(tmp_path))["e"])
    assert torch.equal(train.params(grown)["e"][7], train.params(grown)["e"][:6].mean(0))
    after, _ = train(grown, torch.arange(8))
    assert after.step == 2


def test_state_that_copies_the_parameter_is_resized_by_its_function(tmp_path: Path) -> None:
    optimizer = averaged(fp.optim.adamw(0.1))
    train = fp.train_step(lambda p, x: (x @ p["w"]).square().mean(), optimizer, Mesh(data=2), fp.zero(1, "data"))
    train.save(train(train.init({"w": torch.ones(3)}), torch.ones(2, 3))[0], tmp_path)
    _, old = train.whole(train.restore(tmp_path))
    _, state = train.whole(train.restore(tmp_path, like={"w": torch.ones(5)}, resize={"w": tiled}))
    assert torch.equal(state.average["w"], tiled(old.average["w"], (5,))) and not state.inner.mean["w"][3:].any()


def test_a_tree_of_one_tensor(tmp_path: Path) -> None:
    train = fp.train_step(lambda w, x: (x @ w).square().mean(), fp.optim.adamw(0.1), Mesh(data=2), fp.zero(3, "data"))
    train.save(train(train.init(torch.ones(3)), torch.ones(2, 3))[0], tmp_path)
    params, state = train.whole(train.restore(tmp_path, like=torch.ones(5), resize={"*": "zeros"}))
    assert (params[3:] == 0).all() and (state.mean[:3] != 0).all() and (state.mean[3:] == 0).all()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    train = step(PLANS["zero 3, padded"])
    train.save(train.init(params_of((6, 4, 4))), tmp_path)
    grown = params_of((8, 4, 4), "meta")
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (None, {"embed": "zeros"}, ValueError, r"resize=… takes the new shapes from like=…"),
        (grown, {"embde": "zeros"}, ValueError, r"'embde' matches no parameter; the nearest are 'embed'"),
        (grown, {"embed": "ones"}, ValueError, r"resize=.'embed': 'ones'.: it is 'zeros', or a function"),
        (
            grown,
            {"embed": "zeros"},
            CheckpointError,
            r"params 'head': \(4, 6\) in the checkpoint, \(4, 8\) in this step",
        ),
        (grown, {"*": lambda old, shape: old}, ValueError, r"params 'embed' returned a tensor of shape \(6, 4\); its"),
        (
            grown,
            {"*": lambda old, shape: 1.0},
            ValueError,
            r"params 'embed' returned a float; its shape in this step is",
        ),
        (
            grown | {"embed": torch.ones(8)},
            {"*": "zeros"},
            CheckpointError,
            r"\(6, 4\) in the checkpoint, \(8,\) in this",
        ),
    ]
    for like, resize, kind, message in cases:
        with pytest.raises(kind, match=message):
            train.restore(tmp_path, like=like, resize=resize)


def _noise(rank: int) -> Callable[[torch.Tensor, Shape], torch.Tensor]:
    return lambda old, shape: by_hand(old, shape) + rank


def on_a_rank(rank: int, folder: str) -> Any:
    train = step((Mesh(data=2), fp.zero(3, "data"), fp.optim.adamw(0.1)))
    train.save(random_state(train, params_of((6, 4, 4))), folder)
    like = params_of((9, 4, 4), "meta")
    found = []
    for rule in ("zeros", by_hand):
        found.append(train.params(train.restore(folder, like=like, resize={"*": rule}))["embed"])
    try:
        train.restore(folder, like=like, resize={"*": _noise(rank)})
    except InputMismatchError as error:
        found.append(str(error))
    return found


def test_processes_agree_on_what_a_function_returns(tmp_path: Path) -> None:
    for zeros, made, refused in run_on_processes(on_a_rank, 2, str(tmp_path)):
        assert (
            torch.equal(zeros, made) and torch.equal(zeros[:6], params_of((6, 4, 4))["embed"]) and not zeros[6:].any()
        )
        assert (
            refused
            == "resize: the functions returned other values on other ranks: let them draw from a generator with a seed"
        )
