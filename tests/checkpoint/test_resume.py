"""What a checkpoint says beside the state: seed, order of sums, data position; and restores onto another model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.cli import main
from functional_parallel.errors import CheckpointError
from sharding_specs import Mesh, P

from ..processes import run_on_processes

X = torch.ones(4, 4)
Tree = dict[str, Any]


def loss(p: Tree, x: torch.Tensor) -> torch.Tensor:
    return sum((x @ leaf).square().mean() for leaf in optree.tree_leaves(p))  # type: ignore[return-value]


def step(f: Any = loss, plan: Any = None, mesh: Mesh | None = None, **options: Any) -> Any:
    plan = fp.zero(3, "data") if plan is None else plan
    return fp.train_step(f, fp.optim.adamw(0.1), mesh or Mesh(data=2), plan, **options)


def weights(*names: str) -> Tree:
    return {name: torch.full((4, 2), 1.0 + index) for index, name in enumerate(names)}


# -----------------------------------------------------------------------------
# Other leaves
# -----------------------------------------------------------------------------


def test_other_leaves_are_refused_with_the_list(tmp_path: Path) -> None:
    train = step()
    train.save(train.init(weights("a", "b")), tmp_path)
    with pytest.raises(CheckpointError) as caught:
        step().restore(tmp_path, like=weights("a", "c"))
    message = str(caught.value)
    assert "params 'c': the checkpoint does not have it" in message
    assert "optimizer 'mean/b': this step does not have it" in message
    with pytest.raises(CheckpointError, match=r"params 'b': \(4, 2\) in the checkpoint, \(4, 3\) in this step"):
        step().restore(tmp_path, like=weights("a") | {"b": torch.ones(4, 3)})
    with pytest.raises(CheckpointError, match=r"optimizer 'square/a': this step does not have it"):
        fp.train_step(loss, fp.optim.lion(0.1), Mesh(data=2)).restore(tmp_path)


def test_renamed_leaves(tmp_path: Path) -> None:
    train = step(donate=False)
    state, _ = train(train.init(weights("a", "b")), X)
    train.save(state, tmp_path)
    other = step()
    restored = other.restore(tmp_path, like=weights("a", "c"), rename={"b": "c"})
    params, moments = other.whole(restored)
    before, old = train.whole(state)
    assert torch.equal(params["c"], before["b"]) and torch.equal(moments.mean["c"], old.mean["b"])


def test_renamed_leaves_of_an_optimizer_with_several_tensors_per_parameter(tmp_path: Path) -> None:
    train = fp.train_step(loss, fp.optim.adafactor(0.1), Mesh(data=2), fp.zero(3, "data"), donate=False)
    state, _ = train(train.init(weights("a", "b")), X)
    train.save(state, tmp_path)
    params, moments = train.whole(train.restore(tmp_path, like=weights("a", "row"), rename={"b": "row"}))
    before, old = train.whole(state)
    assert torch.equal(params["row"], before["b"]) and torch.equal(moments.square["row"].row, old.square["b"].row)


def test_a_mesh_without_axes(tmp_path: Path) -> None:
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh())
    train.save(train.init(weights("a")), tmp_path)
    assert torch.equal(train.params(train.restore(tmp_path))["a"], weights("a")["a"])


def test_part_of_a_model(tmp_path: Path) -> None:
    train = step(donate=False)
    state, _ = train(train.init(weights("a", "b")), X)
    train.save(state, tmp_path)
    other = step()
    restored = other.restore(tmp_path, like=weights("a", "new"), partial=True)
    params, moments = other.whole(restored)
    assert torch.equal(params["a"], train.params(state)["a"]) and torch.equal(params["new"], torch.full((4, 2), 2.0))
    assert not moments.mean["new"].any() and moments.mean["a"].any()
    with pytest.raises(CheckpointError, match="partial=True takes new leaves from like="):
        step().restore(tmp_path, partial=True)


def test_another_dtype_only_when_asked(tmp_path: Path) -> None:
    train = step()
    train.save(train.init(weights("a")), tmp_path)
    like = optree.tree_map(torch.Tensor.double, weights("a"))
    with pytest.raises(CheckpointError, match=r"torch.float32 in the checkpoint, torch.float64 in this step; see cast"):
        step().restore(tmp_path, like=like)
    other = step()
    assert other.params(other.restore(tmp_path, like=like, cast=True))["a"].dtype == torch.float64


class Pair(NamedTuple):
    w: torch.Tensor
    b: torch.Tensor


def test_containers_that_json_does_not_name_are_given(tmp_path: Path) -> None:
    params = {"pair": Pair(torch.ones(4, 2), torch.zeros(4, 3)), "a/b": torch.ones(4, 1), "a": {"b": torch.ones(4, 4)}}
    train = step()
    train.save(train.init(params), tmp_path)
    assert {name for name in fp.checkpoint.inspect(tmp_path).leaves if name.startswith("params")} == {
        *("params/a/b", "params/a~1b", "params/pair/b", "params/pair/w")
    }
    with pytest.raises(CheckpointError, match=r"give train.restore"):
        step().restore(tmp_path)
    other = step()
    for like in (params, lambda: params, optree.tree_map(lambda leaf: leaf.to("meta"), params)):
        assert optree.tree_all(optree.tree_map(torch.equal, other.params(other.restore(tmp_path, like=like)), params))


# -----------------------------------------------------------------------------
# The same bits
# -----------------------------------------------------------------------------


def test_another_stage_on_the_same_mesh_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    train = step(donate=False, clip=1.0)
    state, _ = train(train.init(weights("a", "b")), X)
    train.save(state, tmp_path)
    expected = train.params(train(state, X)[0])
    for plan in (fp.zero(0, "data"), fp.zero(1, "data"), fp.zero(2, "data", layout="flat")):
        other = step(plan=plan, clip=1.0)
        assert torch.equal(other.params(other(other.restore(tmp_path), X)[0])["a"], expected["a"])


def test_another_seed_is_warned_of(tmp_path: Path) -> None:
    train = step(seed=1)
    train.save(train.init(weights("a")), tmp_path)
    with pytest.warns(RuntimeWarning, match="seed=1, and this one has seed=2") as caught:
        step(seed=2).restore(tmp_path)
    assert [each.filename for each in caught] == [__file__]


def on_ranks(rank: int, folder: str) -> list[str]:
    train, found = step(reduction="fast"), []
    state = train.init(weights("a"))
    train.save(state, folder)
    for options in ({"reduction": "fast"}, {"reduction": "ordered"}):
        found.append(_warnings(lambda options=options: step(**options).restore(folder)))  # type: ignore[misc]
    state, _ = train(state, X)
    train.save(state, folder)
    if rank == 0:
        (Path(folder) / "step_00000001" / "checkpoint.json").write_text("{}")
    torch.distributed.barrier()
    found.append(_warnings(lambda: train.restore(folder, fallback=True)))
    return found


def _warnings(act: Callable[[], Any]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return "; ".join(str(each.message) for each in caught)


def test_other_sums_are_warned_of(tmp_path: Path) -> None:
    first, second = run_on_processes(on_ranks, 2, str(tmp_path))
    assert first[0] == "" and "by a run with sums fast on data=2 by auto, and this one has ordered" in first[1]
    assert "Restoring step_00000000 instead" in first[2]
    assert second == ["", "", ""]  # one rank warns
    with pytest.warns(RuntimeWarning, match="losses differ from those of the uninterrupted run by rounding"):
        step().restore(tmp_path, step=0)


# -----------------------------------------------------------------------------
# Data
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_sampler_goes_on_at_the_next_sample(ranks: int, tmp_path: Path) -> None:
    sampler, seen = fp.Sampler(20, batch=4, mesh=Mesh(data=2), seed=5), []
    train = step()
    for position, samples in sampler.run():
        seen += samples
        if len(seen) == 12:
            train.save(train.init(weights("a")), tmp_path, data=position)
            break
    other = fp.Sampler(20, batch=4, mesh=Mesh(data=ranks), seed=5)
    batches = [other.run(rank, start=fp.checkpoint.inspect(tmp_path).data_position) for rank in range(ranks)]
    for _ in range(2):
        for each in batches:
            seen += next(each)[1]
    assert sorted(seen) == list(range(20))


class Loader:
    """A loader as torchdata's StatefulDataLoader."""

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers, self.place = num_workers, 0
        self.generator = torch.Generator().manual_seed(1)

    def state_dict(self) -> Tree:
        return {"place": self.place, "generator": self.generator.get_state(), 3: (None, b"x", [1.5])}

    def load_state_dict(self, state: Tree) -> None:
        assert state[3] == (None, b"x", [1.5])
        self.place = state["place"]
        self.generator.set_state(state["generator"])


def test_a_loader_with_a_state(tmp_path: Path) -> None:
    loader = Loader()
    loader.place, expected = 7, torch.rand(3, generator=loader.generator)
    train = step()
    loader.generator.manual_seed(1)
    train.save(train.init(weights("a")), tmp_path, data=loader)
    again = Loader()
    again.generator.manual_seed(9)
    step().restore(tmp_path, data=again)
    assert again.place == 7 and torch.equal(torch.rand(3, generator=again.generator), expected)
    with pytest.raises(CheckpointError, match="saved with 0 workers and has 2 now"):
        step().restore(tmp_path, data=Loader(2))


def a_loader_per_rank(rank: int, folder: str) -> int:
    loader = Loader()
    loader.place = 10 + rank
    train = step()
    train.save(train.init(weights("a")), folder, data=loader)
    again = Loader()
    step().restore(folder, data=again)
    return again.place


@pytest.mark.filterwarnings("ignore:.*losses differ:RuntimeWarning")
def test_loaders_of_another_number_of_processes_are_refused(tmp_path: Path) -> None:
    assert run_on_processes(a_loader_per_rank, 2, str(tmp_path)) == [10, 11]
    with pytest.raises(CheckpointError, match="has the states of 2 loaders, and there are 1 processes"):
        step().restore(tmp_path, data=Loader())
    train = step()
    train.save(train.init(weights("a")), tmp_path / "other", data=fp.Position(1, 2))
    with pytest.raises(CheckpointError, match="no state of a loader"):
        step().restore(tmp_path / "other", data=Loader())


# -----------------------------------------------------------------------------
# The command line
# -----------------------------------------------------------------------------


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = step(donate=False)
    state = train.init(weights("a"))
    train.save(state, tmp_path, extra={"run": 1})
    train.save(train(state, X)[0], tmp_path, data=fp.Position(0, 1))
    assert main(["checkpoint", str(tmp_path), "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "step 1 of a run on Mesh(data=2)" in shown and "every byte is as it was written" in shown
    assert "params/a" in shown and "(4, 2)" in shown and "Position(epoch=0, batch=1)" in shown
    assert main(["checkpoint", str(tmp_path), "--step", "0"]) == 0 and "{'run': 1}" in capsys.readouterr().out
    assert main(["checkpoint", str(tmp_path), "--diff", str(tmp_path / "step_00000000")]) == 0
    assert "params/a: 8 of 8 elements differ, by at most 0.1" in capsys.readouterr().out
    assert main(["checkpoint", str(tmp_path), "--consolidate", str(tmp_path / "one")]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert main(["checkpoint", str(tmp_path / "nothing")]) == 2 and "there is no checkpoint" in capsys.readouterr().err


def test_a_spec_with_an_inner_factor(tmp_path: Path) -> None:
    """A fused dim is three boxes per rank."""
    plan = fp.tensor_parallel("tensor", {"*": P(None, (3, "tensor"))})
    train = step(plan=plan, mesh=Mesh(tensor=2))
    full = {"qkv": torch.arange(48.0).view(4, 12)}
    train.save(train.init(full), tmp_path)
    assert len(list((tmp_path / "step_00000000" / "params").iterdir())) == 6
    other = step()
    assert torch.equal(other.params(other.restore(tmp_path))["qkv"], full["qkv"])
