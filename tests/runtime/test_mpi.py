"""Training under mpirun, with collectives by mpi4py: the bits of simulated ranks, and errors that end all ranks.

The laws of every collective under mpirun are in `tests/collectives/test_processes.py`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.runtime.mpi import BACKEND_VARIABLE, chosen_backend
from sharding_specs import Mesh, P
from tests.mpirun import mpirun, run_under_mpirun
from tests.pipelines.work import four_ranks, trained
from tests.runtime import training
from tests.runtime.test_bits import PLANS, train

SCRIPT = Path(__file__)
BY_MPIRUN = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def zero_and_pipeline(rank: int) -> list[list[torch.Tensor]]:
    """Twenty steps of ZeRO-3, summed in rank order, and three of a pipeline."""
    return [train(PLANS["zero 3"], Mesh(data=2), "ordered"), trained(Mesh(pipe=2), "1f1b", None)]


def test_training_on_two_processes_gives_the_bits_of_simulated_ranks() -> None:
    found = run_under_mpirun(zero_and_pipeline, 2)  # first: it may skip
    simulated = zero_and_pipeline(0)
    for ranks_results in found:
        for result, expected in zip(ranks_results, simulated, strict=True):
            assert all(map(torch.equal, result, expected)) and len(result) == len(expected)


@pytest.mark.slow
def test_a_pipeline_beside_zero_3_on_four_processes_gives_the_bits_of_simulated_ranks() -> None:
    names = ["pipe and data, zero 3", "pipe and tensor"]
    found = run_under_mpirun(four_ranks, 4, names, timeout=400)
    simulated = four_ranks(0, names)
    for results in found:
        for name in names:
            assert all(map(torch.equal, results[name], simulated[name])), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["mpi4py", "mpi"])
def test_a_script_prints_the_losses_of_simulated_ranks(
    ranks: int, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name "mpi" means torch's own backend where torch has it; no published build does."""
    if backend == "mpi" and torch.distributed.is_mpi_available():
        pytest.skip("this build of torch has a backend mpi of its own, whose sums have another order")
    done = mpirun(ranks, training.__file__, "2", str(ranks // 2), backend=backend)
    assert done.returncode == 0, done.stderr
    training.main(data=2, tensor=ranks // 2)
    launched, simulated = (re.findall(r"loss ([\d.]+)", text) for text in (done.stdout, capsys.readouterr().out))
    assert len(launched) == len(simulated) == 5  # found anywhere in a line, as mpirun may join lines of two ranks
    for ours, theirs in zip(map(float, launched), map(float, simulated), strict=True):
        assert abs(ours - theirs) <= 1e-12 * theirs
    assert done.stdout.count("groups at the end:") == done.stdout.count("False") == ranks


@pytest.mark.slow
@pytest.mark.parametrize("how, told", [("raises", "ended by ValueError: of its own"), ("leaves", "at the end of its")])
def test_a_rank_that_does_not_take_part_ends_the_others(how: str, told: str) -> None:
    done = mpirun(2, str(SCRIPT), how)
    assert done.returncode != 0 and "CollectiveError: rank" in done.stderr
    assert told in done.stderr and "rank 1 (data=1)" in done.stderr


def test_what_chooses_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BACKEND_VARIABLE, "RANK", *BY_MPIRUN):
        monkeypatch.delenv(name, raising=False)
    assert chosen_backend() is None
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert chosen_backend() is None, "mpirun starts processes of gloo and nccl too"
    for name in ("mpi4py", "mpi", "gloo", "nccl"):
        monkeypatch.setenv(BACKEND_VARIABLE, name)
        assert chosen_backend() == name
    monkeypatch.setenv(BACKEND_VARIABLE, "mpi4py")
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK")
    assert chosen_backend() is None, "alone, its ranks are simulated"
    for name in BY_MPIRUN:
        with monkeypatch.context() as launched:
            launched.setenv(name, "1")
            assert chosen_backend() == "mpi4py"
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"but mpirun did not start this process: none of OMPI.* and RANK=1 is"):
        chosen_backend()
    monkeypatch.setenv(BACKEND_VARIABLE, "ucx")
    with pytest.raises(ValueError, match="FUNCTIONAL_PARALLEL_BACKEND='ucx': write one of 'gloo', 'nccl', 'mpi'"):
        chosen_backend()


def main(how: str) -> Any:
    total = fp.compile(lambda x: fp.psum(x.sum(), "data"), Mesh(data=2), in_specs=(P("data"),), out_specs=P())
    total(torch.ones(4))
    if fp.rank() == 1 and how == "leaves":
        return
    if fp.rank() == 1:
        raise ValueError("of its own")
    total(torch.ones(4))


if __name__ == "__main__":
    main(*sys.argv[1:])
