"""`fp.launch`: results and errors of all ranks come back, and nothing is left behind."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # else every rank would import it, when it first traces
import torch.distributed as dist

import functional_parallel as fp
from functional_parallel.runtime import launch
from sharding_specs import Mesh

from .launched import total

ROOT = Path(__file__).parents[2]
LAUNCH = sys.modules["functional_parallel.runtime.launch"]


def children() -> list[str]:
    """This process's children, but for the one that Python keeps once a new process was spawned."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [each for each in found if b"resource_tracker" not in Path(f"/proc/{each}/cmdline").read_bytes()]


def left() -> tuple[dict[str, str], list[str], int, list[Any]]:
    """What a call of `launch` might leave in this process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return environment, children(), threading.active_count(), multiprocessing.active_children()


def shared() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "functional_parallel"))]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    before, memory = left(), shared()
    yield
    assert left() == before and not dist.is_initialized()
    assert set(shared()) <= set(memory)


# -----------------------------------------------------------------------------
# Results
# -----------------------------------------------------------------------------


def test_results_come_in_the_order_of_ranks() -> None:
    """The mesh was used in this process, where its ranks are simulated: those of `launch` are real."""
    assert total() == 6.0
    offset = torch.ones(2)
    found = fp.launch(lambda x: {"x": x + offset * fp.rank(), "total": total()}, 2, torch.zeros(2))
    assert [each["total"] for each in found] == [6.0, 6.0]
    assert torch.equal(torch.stack([each["x"] for each in found]), torch.tensor([[0.0, 0.0], [1.0, 1.0]]))


def test_a_function_of_a_notebook() -> None:
    """Its module is __main__, which has no file there."""
    names: dict[str, Any] = {"__name__": "__main__", "fp": fp, "total": total}
    exec("class Found(int): pass\ndef cell(): return Found(fp.rank()), total()", names)
    sys.modules["__main__"].Found = names["Found"]  # type: ignore[attr-defined]
    try:
        assert fp.launch(names["cell"], 2) == [(0, 6.0), (1, 6.0)]
    finally:
        del sys.modules["__main__"].Found  # type: ignore[attr-defined]


def after_a_backward(depth: int) -> str:
    """Differentiate in this process, backwards inside backwards, then on ranks. Return the losses or the error."""

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
            ctx.depth = depth
            return x @ x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            if ctx.depth:
                with torch.enable_grad():
                    Nested.apply(torch.ones(64, 64, requires_grad=True), ctx.depth - 1).sum().backward()
            return grad, None

    def trained() -> float:
        loss = lambda w, x: (x @ w).square().mean()  # noqa: E731
        train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"))
        _, metrics = train(train.init(torch.eye(4)), torch.ones(4, 4))
        return float(metrics.loss)

    Nested.apply(torch.ones(64, 64, requires_grad=True), depth).sum().backward()
    try:
        return str(fp.launch(trained, 2))
    except fp.LaunchError as error:
        return str(error)


@pytest.mark.parametrize(
    "depth, found", [(0, "[1.0, 1.0]"), (100, "deeply nested one; a fork lacks them: pass start='spawn'")]
)
def test_training_after_a_backward_of_this_process(depth: int, found: str) -> None:
    """A fork has none of the threads that this process computed with. Those of autograd, of a deep backward, it misses.

    A process of its own does not have the threads of other tests.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert found in pool.submit(after_a_backward, depth).result()


def test_ranks_compute_with_several_threads_after_this_process_did() -> None:
    """OpenMP in a fork waits for the threads of this process, which are not there."""
    x = torch.ones(2000, 500)

    def many() -> tuple[float, int]:
        torch.set_num_threads(2)
        return float(x.exp().log().sum()), torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        assert many()[1] == 2
        assert [number for _, number in fp.launch(many, 2)] == [2, 2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_new_processes_that_share_nothing() -> None:
    assert fp.launch(total, 2, start="spawn") == [6.0, 6.0]


NOTEBOOK = """
import functional_parallel as fp
from tests.runtime.launched import total
def cell():
    return fp.rank(), total()
try:
    print(fp.launch(cell, 2, start="spawn"))
except fp.LaunchError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_notebook_whose_functions_are_sent_to_new_processes() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", NOTEBOOK]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    has_cloudpickle = importlib.util.find_spec("cloudpickle") is not None
    assert ("[(0, 6.0), (1, 6.0)]" if has_cloudpickle else "install cloudpickle") in done.stdout


# -----------------------------------------------------------------------------
# Ranks that fail
# -----------------------------------------------------------------------------


def failing(rank: int, how: str) -> float:
    """One rank fails after a collective, and the others wait for it in the next one."""
    total()
    if fp.rank() == rank:
        if how == "raises":
            raise KeyError("a name that is not there")
        if how == "leaves":
            sys.exit(3)
        os._exit(17) if how == "exits" else os.kill(os.getpid(), signal.SIGKILL)
    return total()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", r"rank {} of 2 raised\nTraceback(.|\n)*in failing\n(.|\n)*KeyError: 'a name that is not there'"),
        ("leaves", r"rank {} of 2 raised\nTraceback(.|\n)*SystemExit: 3"),
        ("exits", r"rank {} of 2 ended with exit code 17 before it returned"),
        ("is killed", r"rank {} of 2 was ended by SIGKILL before it returned"),
    ],
)
def test_the_rank_that_fails_is_reported(how: str, told: str) -> None:
    """And not those that waited for it, whichever of them is heard first."""
    began = time.monotonic()
    for rank in range(2):
        with pytest.raises(fp.LaunchError, match=told.format(rank)) as error:
            fp.launch(failing, 2, rank, how)
        if how == "raises":
            assert isinstance(error.value.__cause__, KeyError)
    assert time.monotonic() - began < 60


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(fp.LaunchError, match=r"rank 0 of 1 raised(.|\n)*pickle"):
        fp.launch(lambda: lambda: None, 1)


def test_an_error_whose_class_cannot_be_made_again() -> None:
    class Odd(Exception):
        def __init__(self, one: int, other: int) -> None:
            super().__init__(f"{one} and {other}")

    def fails() -> None:
        raise Odd(1, 2)

    with pytest.raises(fp.LaunchError, match="Odd: 1 and 2") as error:
        fp.launch(fails, 1)
    assert error.value.__cause__ is None


# -----------------------------------------------------------------------------
# Ends
# -----------------------------------------------------------------------------


def waiting_forever(folder: Path) -> None:
    (folder / f"{os.getpid()}").touch()
    time.sleep(300)


def appeared(folder: Path, number: int) -> list[int]:
    end = time.monotonic() + 60
    while len(found := [int(path.name) for path in folder.iterdir()]) < number:
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    ranks: list[int] = []

    def interrupt() -> None:
        ranks.extend(appeared(tmp_path, 2))
        while not all(map(is_gone, ranks)):  # Python drops an interrupt that comes in a destructor
            os.kill(os.getpid(), signal.SIGINT)
            end = time.monotonic() + 5
            while time.monotonic() < end and not all(map(is_gone, ranks)):
                time.sleep(0.02)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore interrupts
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            fp.launch(waiting_forever, 2, tmp_path)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(ranks) == 2 and all(map(is_gone, ranks))


def test_ranks_end_with_the_process_that_launched_them(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    caller = context.Process(target=fp.launch, args=(waiting_forever, 2, tmp_path))
    caller.start()
    ranks = appeared(tmp_path, 2)
    caller.kill()
    caller.join()
    caller.close()
    end = time.monotonic() + 30
    while not all(map(is_gone, ranks)):
        assert time.monotonic() < end
        time.sleep(0.05)


# -----------------------------------------------------------------------------
# Refusals
# -----------------------------------------------------------------------------


def test_a_rank_launches_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fp.LaunchError, match=r"rank 0 of 2 raised(.|\n)*this process is rank 0 of 2 itself"):
        fp.launch(lambda: fp.launch(total, 2), 2)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(fp.LaunchError, match="this process is rank 1 of 4 itself"):
        fp.launch(total, 2)


@pytest.mark.parametrize("ranks", [0, -1, True, "2"])
def test_a_number_of_ranks_that_is_none(ranks: Any) -> None:
    with pytest.raises(ValueError, match="write the number of processes"):
        fp.launch(total, ranks)


def test_an_unknown_start() -> None:
    with pytest.raises(ValueError, match="start='threads': write 'fork' or 'spawn'"):
        fp.launch(total, 2, start="threads")


def test_cuda_and_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process that has initialised CUDA cannot use it."""
    assert LAUNCH._start_method(2, None) == "fork"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert LAUNCH._start_method(2, None) == "spawn"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(fp.LaunchError, match="CUDA is initialised in this process"):
        launch(total, 2, start="fork")
    monkeypatch.undo()


def test_functions_that_no_new_process_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(fp.LaunchError, match=r"cannot be sent to a new process \(.*lambda.*install cloudpickle"):
        fp.launch(lambda: None, 2, start="spawn")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def cell(): pass", names)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(
        fp.LaunchError, match=r"a new process cannot find <function cell at .*>: its module has no file"
    ):
        fp.launch(names["cell"], 2, start="spawn")
    monkeypatch.undo()
