"""A row of the migration tables: what a script of another library has, what it has here, and a check of the latter."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["NAMES", "Row", "run"]

NAMES = Path(__file__).with_name("names.py")


class Row(NamedTuple):
    """Row of a table.

    Attributes:
        left: code, flags or keys of the other library, one per line.
        right: lines of Python here, over the names of `names.py`; empty if nothing has to be written.
        check: whether the value of the last line of `right`, for an assignment what it assigns, does what the row says.
        note: text of the last column.
        limit: words of a limit in docs/what_works.md, for a row without counterpart.
    """

    left: str
    right: str = ""
    check: Callable[[Any], bool] | None = None
    note: str = ""
    limit: str = ""


def run(row: Row) -> Any:
    """Run the lines of a row with fresh names. Return the value of the last line."""
    names = runpy.run_path(str(NAMES))
    lines = ast.parse(row.right).body
    last = lines.pop() if lines else None
    exec(compile(ast.Module(lines, []), "<row>", "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "<row>", "eval"), names)
    if isinstance(last, ast.Assign):
        exec(compile(ast.Module([last], []), "<row>", "exec"), names)
        return eval(ast.unparse(last.targets[0]), names)
    assert last is None, "the last line of a row is an expression or an assignment"
    return None
