"""The table of passes: complete, in the order of its phases, and the page docs/passes.md is made from it.

`python -m tests.passes.test_table` writes the table into the page.
"""

from __future__ import annotations

import inspect
import pkgutil
from importlib import import_module
from pathlib import Path

from functional_parallel import passes
from functional_parallel.passes import ProgramPass
from functional_parallel.passes.table import PASSES

from ..written import with_part

PAGE = Path(__file__).parent.parent.parent / "docs" / "passes.md"
BEGIN, END = "<!-- passes: from passes/table.py -->\n", "\n<!-- end of passes -->"


def page() -> str:
    rows = [
        f"| `{each.name}` | {each.phase.name.lower().replace('_', ' ')} | {each.scope.value} | {_summary(each)} | "
        f"{requested_by} |"
        for each, requested_by in PASSES
    ]
    table = "\n".join(["| name | phase | scope | what it does | requested by |", "|---|---|---|---|---|", *rows])
    return with_part(PAGE.read_text(), BEGIN, table, END)


def _summary(kind: type[ProgramPass]) -> str:
    return (kind.__doc__ or "").splitlines()[0].rstrip(".")


def test_every_pass_is_in_the_table() -> None:
    for module in pkgutil.walk_packages(passes.__path__, f"{passes.__name__}."):
        import_module(module.name)
    found, pending = set(), [ProgramPass]
    while pending:
        pending += (kinds := [each for each in pending.pop().__subclasses__() if each.__module__ in _modules()])
        found.update(kinds)
    assert {each for each in found if not inspect.isabstract(each)} == {each for each, _ in PASSES}


def _modules() -> set[str]:
    return {module.name for module in pkgutil.walk_packages(passes.__path__, f"{passes.__name__}.")}


def test_the_table_is_in_the_order_of_phases() -> None:
    phases = [each.phase for each, _ in PASSES]
    assert phases == sorted(phases)


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.passes.test_table"


if __name__ == "__main__":
    PAGE.write_text(page())
