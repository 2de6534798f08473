"""Cases of errors that ranks raise on processes; see `cases`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, use_runtime
from tests.processes import run_on_processes

from .cases import DATA, W, X, case, loss, trained


@cache
def on_two_processes() -> dict[str, str]:
    """The texts of errors that need processes, by their names."""
    first, second = run_on_processes(_rank, 2)
    assert set(first) == set(second)
    return dict(first)


def _rank(rank: int) -> dict[str, str]:
    use_runtime(ProcessRuntime(DATA, timeout=6))
    found: dict[str, str] = {}

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
        except fp.errors.Error as error:
            found[type(error).__name__] = str(error)

    train = trained(batch="own")
    state = train.init(W)
    state, _ = train(state, X)
    note(lambda: trained().init({"w": W["w"] + rank}))
    note(lambda: fp.compile(fp.data_parallel("data")(lambda p, x: loss(p, x) + (x.sum() if rank else 0.0)), DATA)(W, X))
    note(lambda: train(state, X[: 4 - rank]))
    return found


@case
def CallMismatchError() -> Any:
    raise fp.errors.CallMismatchError(on_two_processes()["CallMismatchError"])


@case
def InputMismatchError() -> Any:
    raise fp.errors.InputMismatchError(on_two_processes()["InputMismatchError"])


@case
def ProgramMismatchError() -> Any:
    raise fp.errors.ProgramMismatchError(on_two_processes()["ProgramMismatchError"])


@case
def CollectiveError() -> Any:
    found = run_on_processes(_that_dies, 2, deaths=True)
    raise fp.errors.CollectiveError(found[0])


def _that_dies(rank: int) -> str:
    use_runtime(ProcessRuntime(DATA, timeout=20))
    train = trained()
    state, _ = train(train.init(W), X)
    train.params(state)
    if rank:
        time.sleep(0.5)  # rank 0 has left the call by then
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    try:
        train(state, X)
    except fp.errors.CollectiveError as error:
        return str(error)
    return ""


@case
def ReentrantCallError() -> Any:
    (found, _) = run_on_processes(_on_two_threads, 2)
    raise fp.errors.ReentrantCallError(found)


def _on_two_threads(rank: int) -> str:
    entered, refused, found = threading.Event(), threading.Event(), list[str]()

    def that_waits(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        refused.wait(20)
        return x.clone()

    op = torch.library.custom_op("texts::waits", that_waits, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.clone)
    fp.register_rule(torch.ops.texts.waits.default, "... -> ...")
    train, plan = trained(), fp.zero(3, "data")
    state, _ = train(train.init(W), X)
    evaluate = train.compile(plan(lambda p, x: loss(p, x)))
    waiting = train.compile(plan(lambda p, x: loss(p, op(x))))
    evaluate(state, X)
    thread = threading.Thread(target=lambda: waiting(state, X), name="evaluation")
    thread.start()
    entered.wait(20)
    try:
        evaluate(state, X)
    except fp.errors.ReentrantCallError as error:
        found.append(str(error))
    refused.set()
    thread.join()
    return found[0]
