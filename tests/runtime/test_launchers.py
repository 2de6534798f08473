"""Launchers start the same script on two ranks; the variables of those that are not here are read alike."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 - else every rank would import it, when it first traces
import torch.distributed as dist

import functional_parallel as fp
from functional_parallel.cli import main
from functional_parallel.runtime import default_runtime, launch_of_environment, launchers
from sharding_specs import Mesh

from . import launched
from .launched import free_port, total

SCRIPT = Path(launched.__file__)
READ = {name for names in launchers._LAUNCHERS for each in names[1:] for name in each}
VARIABLES = {
    *READ,
    "LOCAL_WORLD_SIZE",
    *launchers._MARKS,
    "MASTER_ADDR",
    "MASTER_PORT",
    "ENVIRONMENT",
    "TORCHELASTIC_USE_AGENT_STORE",
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


# -----------------------------------------------------------------------------
# Launchers that run here
# -----------------------------------------------------------------------------


def started(*command: str, prefix: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2]), **variables}
    path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] += f"{os.pathsep}{path}" if path else ""
    ends = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen((*prefix, sys.executable, *command), env=environment, text=True, **ends)


def lines_of(*processes: subprocess.Popen[str]) -> list[str]:
    """Wait for launchers; return what their ranks printed, sorted."""
    found: list[str] = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
            assert "destroy_process_group" not in errors, "torch's warning of a group that nobody let go"
            found += out.splitlines()
    finally:
        for process in processes:
            process.kill()
    return sorted(found)


def expected(by: str, arguments: bool = False, local: tuple[int, int] = (0, 1)) -> list[str]:
    return [
        *(f"{by}: rank {rank} of 2, local {local[rank]}, argument {rank if arguments else None}" for rank in range(2)),
        *["group at the end: False"] * 2,
        *["total 6.0"] * 2,
    ]


def old(*options: str) -> list[str]:
    return ["-m", "torch.distributed.launch", *options, "--nproc_per_node=2", f"--master_port={free_port()}"]


def test_torch_distributed_launch() -> None:
    """Without --use_env it passes --local-rank beside the variables; `test_torchrun` has torchrun."""
    assert lines_of(started(*old(), str(SCRIPT))) == sorted(expected("torchrun", arguments=True))


@pytest.mark.slow
def test_torch_distributed_launch_with_variables() -> None:
    assert lines_of(started(*old("--use_env"), str(SCRIPT))) == sorted(expected("torchrun"))


@pytest.mark.slow
def test_processes_that_the_script_spawns() -> None:
    assert lines_of(started(str(SCRIPT), "spawn")) == sorted(expected("a launcher", local=(0, 0)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch() -> None:
    """Without GPUs it needs MPI to start several ranks, unless it takes them to be there."""
    options = ("--multi_gpu", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
    command = ["-m", "accelerate.commands.launch", *options, "--num_processes=2", f"--main_process_port={free_port()}"]
    assert lines_of(started(*command, str(SCRIPT))) == sorted(expected("accelerate launch"))


@contextmanager
def two_hosts() -> Iterator[list[tuple[str, ...]]]:
    """Two network namespaces with a cable between them; yield the commands that run something in either."""
    names = [f"fp{os.getpid()}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(("ip", *words), check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield [("ip", "netns", "exec", name) for name in names]
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def on_two_hosts(prefixes: list[tuple[str, ...]], address: str, interface: str) -> list[str]:
    options = ["--nnodes=2", "--nproc-per-node=1", f"--master-addr={address}", f"--master-port={free_port()}"]
    command = ["-m", "torch.distributed.run", *options]
    return lines_of(
        *(
            started(*command, f"--node-rank={number}", str(SCRIPT), prefix=prefix, GLOO_SOCKET_IFNAME=interface)
            for number, prefix in enumerate(prefixes)
        )
    )


@pytest.mark.slow
def test_torchrun_on_two_hosts_of_one_network() -> None:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the command ip")
    try:
        with two_hosts() as hosts:
            found = on_two_hosts(hosts, "10.77.0.1", "cable")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    assert found == sorted(expected("torchrun", local=(0, 0)))


@pytest.mark.slow
def test_two_torchruns_on_one_host() -> None:
    assert on_two_hosts([(), ()], "127.0.0.1", "lo") == sorted(expected("torchrun", local=(0, 0)))


# -----------------------------------------------------------------------------
# Variables of launchers that are not here
# -----------------------------------------------------------------------------


def of_deepspeed(rank: int, port: int) -> dict[str, str]:
    ours = {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": f"{rank}", "LOCAL_SIZE": "2"}
    return ours | {"CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


def of_deepspeed_include(rank: int, port: int) -> dict[str, str]:
    """Of `--include localhost:1,3`."""
    return of_deepspeed(rank, port) | {"CUDA_VISIBLE_DEVICES": "1,3"}


def of_srun(rank: int, port: int) -> dict[str, str]:
    """Without MASTER_PORT, which the number of the job gives."""
    ours = {"SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}", "SLURM_NTASKS": "2"}
    return ours | {"SLURM_NODELIST": "localhost", "SLURM_JOB_ID": f"{port}", "SLURM_STEP_ID": "0"}


def of_open_mpi(rank: int, port: int) -> dict[str, str]:
    ours = {"OMPI_COMM_WORLD_RANK": f"{rank}", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": f"{rank}"}
    return ours | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": f"prterun-here-{port}@1"}


def of_mpich(rank: int, port: int) -> dict[str, str]:
    ours = {"PMI_RANK": f"{rank}", "PMI_SIZE": "2", "MPI_LOCALRANKID": f"{rank}", "MPI_LOCALNRANKS": "2"}
    return ours | {"MASTER_PORT": f"{port}"}


LAUNCHED = {of_deepspeed: "deepspeed", of_deepspeed_include: "deepspeed", of_srun: "srun", of_open_mpi: "mpirun"}
LAUNCHED[of_mpich] = "mpirun"


def set_variables(variables: dict[str, str]) -> None:
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)


@pytest.mark.parametrize("of", LAUNCHED, ids=lambda of: of.__name__)
def test_ranks_start_by_the_variables_of_a_launcher(of) -> None:  # type: ignore[no-untyped-def]
    port = free_port()

    def on_rank() -> tuple[int, float, str]:
        set_variables(of(fp.rank(), port))
        launch = launch_of_environment()
        assert launch is not None and launch.local_rank == fp.rank()
        return fp.rank(), total(), launch.by

    assert fp.launch(on_rank, 2) == [(rank, 6.0, LAUNCHED[of]) for rank in range(2)]


def given(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_doctor_prints_which_were_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given(monkeypatch, **of_srun(1, 7), SLURM_STEP_NODELIST="gpu[003-006,9],cpu1")
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    port = launchers._port(("SLURM_JOB_ID", "SLURM_STEP_ID"))
    assert f"srun: rank 1 of 2, rank 0 at gpu003:{port}, by SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1" in told
    assert 10_000 <= port < 30_000
    given(monkeypatch, MASTER_ADDR="10.0.0.9", MASTER_PORT="1234")
    assert main(["doctor"]) == 0
    assert "rank 0 at 10.0.0.9:1234" in capsys.readouterr().out
    given(monkeypatch, RANK="0", WORLD_SIZE="4")
    assert main(["doctor"]) == 0
    assert "launcher  refused: two launchers contradict each other" in capsys.readouterr().out


def test_mpirun_on_several_hosts_needs_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, **of_open_mpi(1, 7) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    launch = launch_of_environment()
    assert launch is not None and launch.address == ""
    assert fp.rank() == 1, "the number is known"
    given(monkeypatch, MASTER_ADDR="10.0.0.9")
    launch = launch_of_environment()
    assert launch is not None and launch.address == "10.0.0.9"


# -----------------------------------------------------------------------------
# Several launchers at a time
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [{"SLURM_PROCID": 1, "SLURM_NTASKS": 4}, {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 2}],
    ids=["another size", "another rank"],
)
def test_launchers_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch, other: dict[str, int]) -> None:
    given(monkeypatch, RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", **other)
    message = "two launchers contradict each other. a launcher: rank 1 of 2.*RANK=1 WORLD_SIZE=2.*unset the variables"
    for call in (fp.rank, lambda: default_runtime(Mesh(never_used=2))):
        with pytest.raises(fp.LaunchError, match=message) as error:
            call()
        assert all(f"{name}={value}" in str(error.value) for name, value in other.items())


@pytest.mark.parametrize(
    "outer",
    [
        {"SLURM_PROCID": 1, "SLURM_NTASKS": 2, "GROUP_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "x"},
        {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 1, "SLURM_NTASKS": 4},
        {"SLURM_PROCID": 0, "SLURM_NTASKS": 8, "ENVIRONMENT": "BATCH"},
        {"SLURM_PROCID": 5, "SLURM_NTASKS": 8, "PMI_RANK": 5, "PMI_SIZE": 8},
    ],
    ids=["an agent on each host", "in a shell of one task", "in a batch script", "that agree"],
)
def test_launchers_in_each_other(monkeypatch: pytest.MonkeyPatch, outer: dict[str, object]) -> None:
    given(monkeypatch, RANK=5, WORLD_SIZE=8, MASTER_ADDR="10.0.0.9", MASTER_PORT=1, **outer)
    launch = launch_of_environment()
    assert launch is not None
    assert (launch.rank, launch.size, launch.address) == (5, 8, "10.0.0.9")


@pytest.mark.parametrize("variables", [{"SLURM_PROCID": 0, "SLURM_NTASKS": 1}, {"PMI_RANK": 0, "PMI_SIZE": 1}])
def test_one_task_simulates_ranks(monkeypatch: pytest.MonkeyPatch, variables: dict[str, int]) -> None:
    given(monkeypatch, **variables, MASTER_ADDR="127.0.0.1")
    assert launch_of_environment() is None and total() == 6.0


def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, RANK="first", WORLD_SIZE=2)
    with pytest.raises(fp.LaunchError, match="RANK is 'first'; a launcher sets it to a number"):
        fp.rank()


BEYOND = [
    ({"RANK": 2, "WORLD_SIZE": 2}, r"RANK=2, but WORLD_SIZE=2, so ranks are 0 … 1"),
    ({"RANK": 0, "WORLD_SIZE": 0}, r"RANK=0, but WORLD_SIZE=0, so there is no rank"),
    ({"RANK": -1, "WORLD_SIZE": 2}, r"RANK is '-1'; a launcher sets it to a number"),
    ({"RANK": "1.0", "WORLD_SIZE": 2}, r"RANK is '1.0'"),
    ({"RANK": 0, "WORLD_SIZE": "two"}, r"WORLD_SIZE is 'two'"),
    ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 2}, r"LOCAL_RANK=2, but WORLD_SIZE=2"),
    ({"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2}, r"LOCAL_RANK=2, but LOCAL_WORLD_SIZE=2"),
    ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": "x"}, r"LOCAL_RANK is 'x'"),
    ({"OMPI_COMM_WORLD_RANK": 4, "OMPI_COMM_WORLD_SIZE": 4}, r"OMPI_COMM_WORLD_RANK=4, but OMPI_COMM_WORLD_SIZE=4"),
    ({"PMI_RANK": 9, "PMI_SIZE": 2}, r"PMI_RANK=9, but PMI_SIZE=2"),
    (
        {"PMI_RANK": 0, "PMI_SIZE": 2, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 1},
        r"MPI_LOCALRANKID=1, but MPI_LOCALNRANKS=1",
    ),
    ({"SLURM_PROCID": 2, "SLURM_NTASKS": 2}, r"SLURM_PROCID=2, but SLURM_NTASKS=2"),
    ({"SLURM_PROCID": 1, "SLURM_NTASKS": 2, "SLURM_LOCALID": 5}, r"SLURM_LOCALID=5, but SLURM_NTASKS=2"),
]


@pytest.mark.parametrize("variables, message", BEYOND, ids=[str(each) for each, _ in BEYOND])
def test_a_rank_that_its_group_lacks_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, object], message: str
) -> None:
    given(monkeypatch, **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()} | variables)
    started_at = time.monotonic()
    for call in (fp.rank, lambda: default_runtime(Mesh(never_used=2)), lambda: fp.launch(total, 2)):
        with pytest.raises(fp.LaunchError, match=message):
            call()
    assert time.monotonic() - started_at < 5
    assert main(["doctor"]) == 0
    assert "launcher  refused: " in capsys.readouterr().out


# -----------------------------------------------------------------------------
# The script's own process group, and its mesh
# -----------------------------------------------------------------------------


def test_the_scripts_own_group_is_used_as_it_is() -> None:
    """Also where two launchers contradict each other: the group says what holds."""

    def on_rank() -> tuple[float, bool, int]:
        dist.init_process_group("gloo")
        group, number = dist.group.WORLD, fp.rank()
        os.environ.update(SLURM_PROCID=str(1 - number), SLURM_NTASKS="2", SLURM_NODELIST="nowhere")
        return total(), dist.group.WORLD is group, fp.rank() - number

    assert fp.launch(on_rank, 2) == [(6.0, True, 0)] * 2


def test_a_mesh_that_does_not_match_the_ranks() -> None:
    with pytest.raises(fp.LaunchError, match=r"data=3 has 3 ranks, but 2 processes are running; start 3") as error:
        fp.launch(total, 2, 3)
    assert isinstance(error.value.__cause__, ValueError)


def test_meshes_that_differ_between_ranks() -> None:
    with pytest.raises(fp.LaunchError, match=r"rank 1 of 2 raised(.|\n)*data=3 has 3 ranks, but 2 processes"):
        fp.launch(lambda: total(2 + fp.rank()), 2)


def test_jobs_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def port() -> int:
        given(monkeypatch, **of_open_mpi(0, 0) | {"PMIX_NAMESPACE": uuid.uuid4().hex})
        launch = launch_of_environment()
        assert launch is not None
        return launch.port

    assert len({port() for _ in range(20)}) > 15
