"""Real processes compute what simulated ranks compute, with the same calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, default_runtime, use_runtime
from sharding_specs import Mesh
from tests.processes import RankError, run_on_processes

from ..trees import assert_close, assert_equal
from . import work

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SIZES = sorted(work.MESHES)


# -----------------------------------------------------------------------------
# What the ranks run
# -----------------------------------------------------------------------------


def on_ranks(rank: int, size: int) -> dict[str, Any]:
    mesh = work.MESHES[size]
    assert isinstance(default_runtime(mesh), ProcessRuntime)
    return {
        **work.everything(mesh),
        "own": with_own_batches(rank, mesh),
        "held": [handle.numel() for handle in zero_3_state(mesh).handles],
        "ordered": with_ordered_sums(mesh),
    }


def with_own_batches(rank: int, mesh: Mesh) -> dict[str, Any]:
    """Every data rank loads its own rows; the ranks along tensor load the same ones."""
    train = fp.train_step(work.loss, fp.optim.adamw(0.05), mesh, work.plan_of(mesh, fp.zero(3, "data")), batch="own")
    state, losses = train.init(work.parameters()), []
    mine = mesh.coordinates(rank)["data"]
    for x, labels in work.batches():
        state, metrics = train(state, x.chunk(2)[mine], labels.chunk(2)[mine])
        losses.append(metrics.loss)
    return {"losses": torch.stack(losses), "params": train.params(state)}


def zero_3_state(mesh: Mesh) -> fp.TrainState:
    plan = work.plan_of(mesh, fp.zero(3, "data"))
    return fp.train_step(work.loss, fp.optim.adamw(0.05), mesh, plan).init(work.parameters())


def with_ordered_sums(mesh: Mesh) -> Any:
    use_runtime(ProcessRuntime(mesh, reduction="ordered"))
    return work.training(mesh)


def on_the_wrong_number(rank: int) -> None:
    fp.train_step(work.loss, fp.optim.sgd(0.1), Mesh(data=3)).init(work.parameters())


# -----------------------------------------------------------------------------
# What must hold
# -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulated() -> dict[int, dict[str, Any]]:
    return {size: work.everything(mesh) for size, mesh in work.MESHES.items()}


@pytest.fixture(scope="module")
def real() -> dict[int, list[dict[str, Any]]]:
    return {size: run_on_processes(on_ranks, size, size, timeout=120.0) for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("what", ["gradients", "derivatives"])
def test_integer_functions_agree_to_the_bit(real: Any, simulated: Any, size: int, what: str) -> None:
    for result in real[size]:
        assert_equal(result[what], simulated[size][what])


@pytest.mark.parametrize("size", SIZES)
def test_they_are_the_numbers_of_one_device(simulated: Any, size: int) -> None:
    want = fp.grad_and_value(work.integer_loss)(*work.integer_arguments())
    for name, got in simulated[size]["gradients"].items():
        assert_equal(got, want), name


@pytest.mark.parametrize("size", SIZES)
def test_training_agrees(real: Any, simulated: Any, size: int) -> None:
    for result in real[size]:
        for name, run in simulated[size]["training"].items():
            assert_close(result["training"][name], run), name


@pytest.mark.parametrize("size", SIZES)
def test_ordered_sums_agree_to_the_bit(real: Any, simulated: Any, size: int) -> None:
    for result in real[size]:
        assert_equal(result["ordered"], simulated[size]["training"])


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_return_the_same_bits(real: Any, size: int) -> None:
    first = real[size][0]
    for result in real[size][1:]:
        assert_equal(result["training"], first["training"])


@pytest.mark.parametrize("size", SIZES)
def test_own_batches_are_parts_of_the_global_one(real: Any, size: int) -> None:
    mesh = work.MESHES[size]
    plan = work.plan_of(mesh, fp.zero(3, "data"))
    want = work.trained(mesh, plan, fp.optim.adamw(0.05), work.loss, noisy=False)
    for result in real[size]:
        assert_close(result["own"], {name: want[name] for name in ("losses", "params")})


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_holds_its_share(real: Any, size: int) -> None:
    share = {2: [2, 4, 24, 12], 4: [2, 4, 12, 8]}[size]  # bias of 3, padded; first/b; first/w; second: 3 x 8 or 4 x 6
    for result in real[size]:
        assert result["held"] == [*share, 1, *share, *share], "parameters; AdamW's step and two moments"


def test_the_mesh_must_fit_the_processes() -> None:
    with pytest.raises(RankError, match=r"data=3 has 3 ranks, but 1 processes are running; start 3"):
        run_on_processes(on_the_wrong_number, 1)
