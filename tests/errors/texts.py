"""A case of each error and warning of the library, and its text as docs/errors.md shows it.

`python -m tests.errors.texts` writes the texts into the page. `tests/errors/test_texts.py` raises every error and
compares. What differs between runs (files, lines, folders, processes, seconds) is replaced.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
import warnings

import functional_parallel as fp
from tests.layout_of_code import ROOT

from . import cases_on_processes  # noqa: F401
from .cases import CASES

PAGE = ROOT / "docs" / "errors.md"


def text_of(name: str) -> str:
    """Raise an error, or warn, and return the text as the page shows it."""
    kind = getattr(fp.errors, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            CASES[name]()
        except kind as error:
            assert type(error) is kind, f"the case raises {type(error).__name__}"
            return _shown(name, str(error))
    found = [each for each in caught if type(each.message) is kind]
    assert found, f"the case of {name} raises nothing"
    return _shown(name, str(found[0].message))


_REPLACED = (
    (r"([\w/]+/|\b)cases(_on_processes)?\.py", "train.py"),
    (r"(?<=\.py:)\d+", "12"),
    (re.escape(tempfile.gettempdir()) + r"/\w+", "runs/gpt"),
    (r"\d+\.\d+ s\b|\b\d+ s\b", "20 s"),
    (r"\([0-9a-f]{8}\)", "(35ae108a)"),
    (r"(?<=\d\.\d\d)\d{4,}", ""),
    (r"process \d+", "process 4711"),
)


def _shown(name: str, text: str) -> str:
    for pattern, replacement in _REPLACED:
        text = re.sub(pattern, replacement, text)
    lines = f"{name}: {text}".splitlines()
    shown = [part for line in lines for part in textwrap.wrap(line, 118, subsequent_indent=_indent(line))]
    return "\n".join(shown)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def section(name: str) -> str:
    """Return the section of an error on the page."""
    found = re.search(rf"^### `{name}`\n.*?(?=^### |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/errors.md has no section for {name}"
    return found.group()


def write() -> None:
    page = PAGE.read_text()
    for name in CASES:
        old = section(name)
        without = re.sub(r"\n```text\n.*?```\n", "", old, flags=re.DOTALL).rstrip("\n")
        page = page.replace(old, f"{without}\n\n```text\n{text_of(name)}\n```\n\n")
    PAGE.write_text(page.rstrip("\n") + "\n")


if __name__ == "__main__":
    from tests.errors import texts

    texts.write()  # under its own name, so that processes find the functions
