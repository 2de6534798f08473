"""New values of the state that still move when a step ends: no reader sees one before it has arrived."""

from __future__ import annotations

import copy
import os
import random
import time
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.program import memory_moves
from functional_parallel.runtime.processes import started_moves
from sharding_specs import Mesh

from ..passes.networks import batch, loss, parameters
from ..processes import RankError, run_on_processes

X, Y = batch(8)


def params() -> Any:
    return optree.tree_map(torch.Tensor.float, parameters(3))


def is_same(a: Any, b: Any) -> bool:
    pairs = zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


class Delayed:
    """Stands in for the copy of a move: it begins late and ends late."""

    def __init__(self, seed: int, longest: float) -> None:
        self.draw, self.longest, self.copy = random.Random(seed), longest, started_moves.copy_into

    def __call__(self, target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.draw.uniform(0, self.longest))
        result = self.copy(target, x)
        time.sleep(self.draw.uniform(0, self.longest))
        return result


def delayed(seed: int, longest: float) -> Delayed:
    memory_moves.LEAST = 0  # every move is in flight
    found = started_moves.copy_into = Delayed(seed, longest)  # type: ignore[assignment]
    return found


def steps(plan: list[Any], offload: Any, **options: Any) -> tuple[Any, Any]:
    made = [[*plan, offload], plan]
    moved, plain = (
        fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(data=2), fp.chain(*each), reduction="ordered", **options)
        for each in made
    )
    return moved, plain


def saved_and_restored(train: Any, state: Any, folder: Path) -> Any:
    train.save(state, folder)
    return train.params(train.restore(folder))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_new_parameters_move_while_gradients_are_computed(clip: float | None) -> None:
    """By groups. Where all gradients have a factor in common, they move while other parameters are updated."""

    def ops(group: Any) -> list[str]:
        offload = fp.offload(state="host", group=group)
        train = fp.train_step(
            loss,
            fp.optim.adamw(1e-2),
            Mesh(data=1),
            fp.chain(fp.mixed_precision("bf16"), fp.zero(2, "data"), offload),
            clip=clip,
        )
        program = train.lower(params(), X.float(), Y)
        moves = {each.node: each.target for each in program.moves() if each.operand.ndim}
        names = [moves.get(node, str(node.target)) for node in program.traced.nodes]
        return [{"fp.adamw_.default": "update"}.get(name, name) for name in names]

    def position(found: list[str], last_of: str) -> int:
        return len(found) - 1 - found[::-1].index(last_of)

    together, groups = ops("1MiB"), ops(1)
    assert together.count("update") == 1 and groups.count("update") == len(optree.tree_leaves(params()))
    assert together.index("device") > position(together, "host")
    assert groups.index("device") < position(groups, "update")
    assert (groups.index("device") < position(groups, "host")) == (clip is None)


READERS = {
    "params": lambda train, state, folder: train.params(state),
    "whole": lambda train, state, folder: train.whole(state)[0],
    "copy": lambda train, state, folder: train.params(train.copy(state)),
    "deep copy": lambda train, state, folder: train.params(copy.deepcopy(state)),
    "sharded": lambda train, state, folder: train.sharded(state)[0].full(),
    "frozen": lambda train, state, folder: train.frozen(state).full(),
    "loaded": lambda train, state, folder: train.params(train.load(state)),
    "checkpoint": saved_and_restored,
}


def _read(rank: int, folder: Path, name: str) -> int:
    plan, offload, options = {
        "host": ([fp.data_parallel("data")], fp.offload(state="host", group=1), {}),
        "disk": (
            [fp.mixed_precision("bf16"), fp.zero(3, "data")],
            fp.offload(state="disk", parameters="disk", path=str(folder), group=500),
            {"clip": 0.5},
        ),
    }[name]
    moved, plain = steps(plan, offload, **options)
    delayed(rank, 0.003)
    state, wanted, found = moved.init(params()), plain.init(params()), 0
    for number, (what, reader) in enumerate({**READERS, "nothing": None, "the last": READERS["whole"]}.items()):
        state, metrics = moved(state, X.float(), Y)
        found += len(state._moves)
        wanted, expected = plain(wanted, X.float(), Y)
        assert is_same(metrics, expected), what
        if reader is not None:
            pairs = {"moved": (moved, state), "plain": (plain, wanted)}
            assert is_same(*(reader(*each, folder / f"{kind} {number}") for kind, each in pairs.items())), what
    assert is_same(moved.whole(state), plain.whole(wanted))
    return found


@pytest.mark.parametrize("name", ["host", "disk"])
def test_no_reader_sees_a_value_before_it_has_arrived(name: str, tmp_path: Path) -> None:
    for moves in run_on_processes(_read, 2, tmp_path, name):
        assert moves > 0


def _after_an_error(rank: int) -> bool:
    moved, plain = steps([fp.data_parallel("data")], fp.offload(state="host"))
    delayed(rank, 0.05)
    state, _ = moved(moved.init(params()), X.float(), Y)
    wanted, _ = plain(plain.init(params()), X.float(), Y)
    with pytest.raises(Exception, match="reduction dim"):
        moved(state, X.float()[:, :3], Y)
    assert state._moves  # not waited for by a step that was refused
    if not (child := os.fork()):  # which has the values, but not the worker
        right = is_same([x for x in state.handles if x.ndim][:3], [x for x in wanted.handles if x.ndim][:3])
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    state, _ = moved(state, X.float(), Y)
    wanted, _ = plain(wanted, X.float(), Y)
    assert is_same(moved.params(state), plain.params(wanted))
    return True


def failing(target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the link is gone")


def test_moves_outlast_errors_and_forks() -> None:
    assert all(run_on_processes(_after_an_error, 2))


def _fails_late(rank: int) -> None:
    moved, _ = steps([fp.data_parallel("data")], fp.offload(state="host"))
    state = moved.init(params())
    link = delayed(rank, 0.01)
    state, _ = moved(state, X.float(), Y)
    link.copy = failing  # type: ignore[assignment]
    moved(state, X.float(), Y)
    time.sleep(60.0)


def test_a_move_that_fails_ends_the_run() -> None:
    with pytest.raises(RankError, match="the link is gone"):
        run_on_processes(_fails_late, 2, timeout=60.0)
