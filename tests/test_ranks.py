"""The processes that tests start as ranks are as a launcher's are."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from .processes import RankError, run_on_processes


def of_a_rank(rank: int, signs: str) -> tuple[str | None, str, int, int, int]:
    return os.environ.get("OF_THIS_TEST"), os.environ["RANK"], dist.get_rank(), hash(signs), os.getpid()


def test_a_rank_has_the_environment_of_its_test_and_hashes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_on_processes(of_a_rank, 2, "a name")
    monkeypatch.setenv("OF_THIS_TEST", "told")
    second = run_on_processes(of_a_rank, 2, "a name")
    assert [found[:3] for found in first] == [(None, "0", 0), (None, "1", 1)]
    assert [found[:3] for found in second] == [("told", "0", 0), ("told", "1", 1)]
    assert first[0][3] != first[1][3], "sets have another order on each"
    assert len({found[4] for found in first + second} | {os.getpid()}) == 5


def dying(rank: int, by_signal: bool) -> None:
    if rank == 1 and by_signal:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        os._exit(7)


@pytest.mark.parametrize(("by_signal", "code"), [(True, -signal.SIGKILL), (False, 7)])
def test_a_rank_that_dies_is_told_by_its_code(by_signal: bool, code: int) -> None:
    assert run_on_processes(dying, 2, by_signal, deaths=True)[1] == code
    with pytest.raises(RankError, match=rf"died without a word: {{1: {code}}}"):
        run_on_processes(dying, 2, by_signal)


def raising(rank: int) -> None:
    if rank == 1:
        raise ValueError("of rank 1")
    dist.barrier()


def test_what_a_rank_raises_ends_all() -> None:
    with pytest.raises(RankError, match=r"(?s)rank \d of 2 raised.*(of rank 1|closed)"):
        run_on_processes(raising, 2)
