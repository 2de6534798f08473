"""Settings of the process that runs the tests, the mark `every`, runtimes, and which process runs which test."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from functional_parallel.runtime import default

from . import process_settings  # noqa: F401


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test that is marked `every(n)`, one in n is run always, and the others are slow."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("every"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for each in cases.values():
        each.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))  # so that all values of all parameters appear
        number = each[0].get_closest_marker("every").args[0]  # type: ignore[union-attr]
        for item in each[-(-len(each) // number) :]:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[Any]:
    """Restore the runtimes of meshes after each test, as a test or a doctest may choose others."""
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
