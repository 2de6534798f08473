"""docs/api.md: equal to the code, with every public name once; docs/errors.md: every error, with its bases."""

from __future__ import annotations

import re
from collections import Counter

import functional_parallel as fp
import sharding_specs

from .api_page import GROUPS, PAGE, entries, page, public_names, ungrouped

ERRORS = PAGE.parent / "errors.md"


def test_every_name_has_a_section() -> None:
    assert not ungrouped(), "add the names to a section of GROUPS in tests/api_page.py"


def test_a_section_has_public_names_only() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert not set(grouped) - set(fp.__all__), "remove the names from GROUPS in tests/api_page.py"
    assert len(set(grouped)) == len(grouped)


def test_the_page_shows_the_code() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.api_page"


def test_every_name_is_on_the_page_once() -> None:
    shown = Counter(re.findall(r"^\| `([\w.]+)", PAGE.read_text(), re.MULTILINE))
    names: dict[int, set[str]] = {}
    for name, value in public_names().items():
        names.setdefault(id(value), set()).add(name)
    wrong = [sorted(same) for same in names.values() if sum(shown[name] for name in same) != 1]
    assert not wrong, "add them to MODULES or GROUPS in tests/api_page.py and run python -m tests.api_page"


def test_every_row_has_a_description() -> None:
    missing = [each.name for each in entries() if len(each.text) < 3]
    assert not missing, "write a docstring, or for data a text in DATA of tests/api_page.py"


def test_a_row_has_no_address() -> None:
    assert " at 0x" not in page()


def test_every_error_is_explained() -> None:
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| (.*?) \|", ERRORS.read_text(), re.MULTILINE))
    bases = {name: [base.__name__ for base in getattr(fp.errors, name).__bases__] for name in fp.errors.__all__}
    assert rows == {name: ", ".join(f"`{base}`" for base in found) for name, found in bases.items()}
    assert re.findall(r"^### `(\w+)`$", ERRORS.read_text(), re.MULTILINE) == sorted(fp.errors.__all__)


def test_errors_are_one_family() -> None:
    for name in fp.errors.__all__:
        kind = getattr(fp.errors, name)
        assert issubclass(kind, Warning) or issubclass(kind, sharding_specs.Error), name
