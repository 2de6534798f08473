"""Parametrised tests of which a part is run always, chosen so that no value of any parameter is left out."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(n: int, **values: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrise a test over all combinations; one in n is run always, and the others with `-m slow`.

    They lie on diagonals, so that every value is in one of them where n is at most the number of another's values.
    """
    cases = []
    for chosen in itertools.product(*(enumerate(each) for each in values.values())):
        always = sum(place for place, _ in chosen) % n == 0
        given = [value for _, value in chosen]
        cases.append(pytest.param(*given, id="-".join(map(str, given)), marks=[] if always else [pytest.mark.slow]))
    return pytest.mark.parametrize(tuple(values), cases)
