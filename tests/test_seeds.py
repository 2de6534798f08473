"""Each test draws its own numbers, whichever tests run before it."""

from __future__ import annotations

import random

import pytest
import torch

from .conftest import _seed

AT_IMPORT = torch.rand(2)


def drawn() -> list[float]:
    numpy = pytest.importorskip("numpy")
    return [*torch.rand(2).tolist(), random.random(), float(numpy.random.rand())]


def test_a_test_is_seeded_by_its_id(request: pytest.FixtureRequest) -> None:
    found = drawn()
    _seed(request.node.nodeid)
    assert drawn() == found


@pytest.mark.parametrize("case", [1, 2])
def test_cases_draw_other_numbers(case: int, request: pytest.FixtureRequest) -> None:
    found = drawn()
    _seed(request.node.nodeid.replace(f"[{case}]", f"[{3 - case}]"))
    assert drawn() != found


def test_a_module_is_seeded_when_it_is_imported(request: pytest.FixtureRequest) -> None:
    _seed(request.node.parent.nodeid)
    assert torch.equal(torch.rand(2), AT_IMPORT)
