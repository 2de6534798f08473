"""The pages of docs/ and the README run: plain blocks are executed, blocks with `>>>` print what they say.

The blocks of one page share their names, in order, so that a page reads as one session.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the line it starts on."""
    text = page.read_text()
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in BLOCK.finditer(text)]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__page__"}
    runner = doctest.DocTestRunner()
    report: list[str] = []
    for line, code in blocks(page):
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, names, f"{name(page)}, {line}", str(page), line)
            runner.run(test, out=report.append, clear_globs=False)
            names.update(test.globs)  # a doctest works on a copy
        else:
            exec(compile("\n" * line + code, str(page), "exec", dont_inherit=True), names)
    assert not report, "".join(report)


def test_the_tutorial_keeps_its_promise() -> None:
    """Two hundred lines of definitions; what it prints to show itself is not counted."""
    definitions = [code for _, code in blocks(ROOT / "docs" / "tutorial.md") if ">>>" not in code]
    lines = [line for code in definitions for line in code.splitlines() if line.strip()]
    assert 150 < len(lines) <= 200, f"{len(lines)} lines"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in LINK.findall(prose) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing
