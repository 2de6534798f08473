"""Examples in the docstrings of the parts that stand beside the compiler run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from functional_parallel import optim, schedules

MODULES = [
    module.name
    for package in (optim, schedules)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]
MODULES += [f"functional_parallel.{name}" for name in ("estimate", "loss_scaling", "sampler")]
MODULES += [f"functional_parallel.program.{name}" for name in ("hardware", "links", "price", "program")]
MODULES += ["functional_parallel.tracing.graph"]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
