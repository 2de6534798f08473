"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

from functional_parallel import collectives

MODULES = [module.name for module in pkgutil.walk_packages(collectives.__path__, collectives.__name__ + ".")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
