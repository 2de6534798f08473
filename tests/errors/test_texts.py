"""docs/errors.md shows the text of each error and warning as a case raises it."""

from __future__ import annotations

import re

import pytest

import functional_parallel as fp

from . import texts


def test_every_error_has_a_case() -> None:
    assert set(texts.CASES) == set(fp.errors.__all__) - {"Error"}


@pytest.mark.parametrize("name", sorted(texts.CASES))
def test_the_page_shows_the_text(name: str) -> None:
    shown = re.search(r"```text\n(.*?)\n```", texts.section(name), re.DOTALL)
    assert shown is not None and shown.group(1) == texts.text_of(name), "run `python -m tests.errors.texts`"
