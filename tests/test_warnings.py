"""Warnings of the library, of torch and of the tests are errors here. Those of other packages are reported."""

from __future__ import annotations

import warnings

import pytest

OWN = [
    "functional_parallel.ir",
    "sharding_specs",
    "torch.nn",
    "tests.runtime.test_launch",
    "_pytest.unraisableexception",
]
OTHERS = ["numba.core.decorators", "pytest_benchmark.logger", "transformers", "numpy", "hypothesis.core"]


@pytest.mark.parametrize("module", [*OWN, __name__, __file__.removesuffix(".py")])
def test_own_warnings_are_errors(module: str) -> None:
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module=module, registry={})


@pytest.mark.parametrize("module", OTHERS)
def test_warnings_of_other_packages_are_no_errors(module: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn_explicit("old", DeprecationWarning, "file.py", 1, module=module, registry={})
    assert len(caught) == 1


def test_what_a_machine_cannot_profile_is_no_error() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn_explicit(
            "Profiler clears events", UserWarning, "file.py", 1, module="torch.profiler", registry={}
        )
    assert len(caught) == 1
