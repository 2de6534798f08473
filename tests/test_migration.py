"""The rows of docs/migration.md run, on simulated meshes, and their left sides name things that exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .migration import of_ddp, of_dtensor, of_fsdp2
from .migration.row import Row, run
from .migration_page import PAGE, TABLES, page

ROWS = [pytest.param(row, id=f"{title}-{row.left}") for title, (rows, _) in TABLES.items() for row in rows]
WORKS = Path(__file__).parent.parent / "docs" / "what_works.md"
LIMITS = " ".join(WORKS.read_text().partition("## Limits")[2].split())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.migration_page`"


@pytest.mark.parametrize("row", ROWS)
def test_a_row_holds(row: Row) -> None:
    if row.limit:
        assert not row.check and row.limit in LIMITS, "a row without counterpart names a limit of what_works.md"
    else:
        assert row.check is not None and row.check(run(row))


# -----------------------------------------------------------------------------
# Left sides
# -----------------------------------------------------------------------------

NAMES_OF = {"DDP": of_ddp.LEFT, "FSDP2": of_fsdp2.LEFT, "DTensor": of_dtensor.LEFT}


@pytest.mark.parametrize("title", NAMES_OF)
def test_names_of_torch_exist(title: str) -> None:
    for row in TABLES[title][0]:
        assert not list(unknown(row.left, NAMES_OF[title])), row.left


@pytest.mark.parametrize(("title", "library"), [("JAX", "jax"), ("Accelerate", "accelerate")])
def test_names_of_other_libraries_exist(title: str, library: str) -> None:
    pytest.importorskip(library)
    names = importlib.import_module(f"tests.migration.of_{library}").left()
    for row in TABLES[title][0]:
        assert not list(unknown(row.left, names)), row.left


def unknown(left: str, names: dict[str, Any]) -> Iterator[str]:
    """Attributes and keywords on a left side that its library does not have."""
    for node in ast.walk(ast.parse(left)):
        if isinstance(node, ast.Attribute) and (owner := found(node.value, names)) is not None:
            if not has(owner, node.attr):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = found(node.func, names)
            if called is None:
                if isinstance(node.func, ast.Name):
                    yield node.func.id
                continue
            parameters = parameters_of(called)
            if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
                yield from (
                    f"{ast.unparse(node.func)}({each.arg}=)" for each in node.keywords if each.arg not in parameters
                )


def parameters_of(called: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(called).parameters
    except ValueError:  # a class in C++, whose calls here have no keywords
        return {}


def found(node: ast.expr, names: dict[str, Any]) -> Any:
    """The object of a dotted name, or None if it is a value of the script."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := found(node.value, names)) is not None:
        return getattr(owner, node.attr, None)
    return None


def has(owner: Any, name: str) -> bool:
    if hasattr(owner, name):
        return True
    return inspect.isclass(owner) and bool(re.search(rf"self\.{name}\b", inspect.getsource(owner)))
