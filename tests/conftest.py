"""Settings of the process that runs the tests, the mark `every`, `--device`, runtimes, and who runs which test."""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from functional_parallel.runtime import default

from . import (
    devices,
    process_settings,  # noqa: F401
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where the tests that start processes have tensors"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") == "cuda":
        devices.choose_cuda()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_cases(items)
    if config.getoption("--device") == "cuda":
        on_processes = [item for item in items if devices.starts_processes(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in on_processes])
        items[:] = on_processes
        for item in items:
            item.add_marker(pytest.mark.cuda)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


def _mark_cases(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `every(n)`, one in n is run always, and the others are slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("every"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for each in cases.values():
        number = each[0].get_closest_marker("every").args[0]  # type: ignore[union-attr]
        always = _with_every_value(each, -(-len(each) // number))
        for item in each:
            if item not in always:
                item.add_marker(pytest.mark.slow)


def _with_every_value(items: list[Any], count: int) -> list[Any]:
    """Choose cases of a test, each with as many values of parameters as possible that the chosen ones lack."""
    left = sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    seen: Counter[Any] = Counter()
    chosen = []
    for _ in range(count):
        best = min(left, key=lambda item: sorted(seen[value] for value in item.callspec.indices.items()))
        left.remove(best)
        chosen.append(best)
        seen.update(best.callspec.indices.items())
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """Seed the generators for the import of a module."""
    _seed(collector.nodeid)
    return (yield)


def _seed(name: str) -> None:
    """Seed every generator by a name, so that a test draws the same numbers alone and among others."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    random.seed(number)
    torch.manual_seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Seed each test and doctest. Restore the runtimes of meshes after it, as it may choose others."""
    _seed(item.nodeid)
    before = dict(default._chosen)
    try:
        return (yield)
    finally:
        default._chosen.clear()
        default._chosen.update(before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one process, so that they share fixtures, programs and models."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)
