"""The packages of the library from the ground up, and what each imports, read from the code.

`python -m tests.layout_of_code` writes the picture of them into CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .written import with_part

__all__ = [
    "LOOSE",
    "ORDER",
    "ROOT",
    "Import",
    "Modules",
    "circles",
    "graph",
    "imports_of",
    "parsed",
    "picture",
    "unit",
    "with_picture",
]

ROOT = Path(__file__).parent.parent
LIBRARY = "functional_parallel"

# From the ground up, loose modules included: each imports from those before it alone.
ORDER = [
    "_torch",
    "errors",
    "quantities",
    "schedules",
    "collectives",
    "ir",
    "tracing",
    "rules",
    "draws",
    "random",
    "ops",
    "checker",
    "functions",
    "partitioner",
    "optim",
    "program",
    "passes",
    "pipelines",
    "requests",
    "transforms",
    "runtime",
    "shared_memory",
    "data",
    "checkpoint",
    "lowering",
    "stateful",
    "compile",
    "training",
    "asynchronous",
    "planning",
    "interop",
    "generation",
    "testing",
    "cli",
    "__init__",
    "__main__",
]
LOOSE = {"__init__", "__main__", "cli", "compile", "errors", "quantities", "random"}
BEGIN, END = "<!-- packages: written by python -m tests.layout_of_code -->", "<!-- end of packages -->"


class Import(NamedTuple):
    """`from target import name` in a module; `target` is absolute, and empty names stand for `import target`."""

    path: Path
    line: int
    module: str
    target: str
    name: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: from {self.target} import {self.name}"


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Return the imports of a file, those inside functions and under TYPE_CHECKING included."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[Import]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = parts[:-1]
    module = ".".join(package if parts[-1] == "__init__" else parts)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, module, alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            target = ".".join((*above, *((node.module,) if node.module else ())))
            for alias in node.names:
                yield Import(path, node.lineno, module, target, alias.name)


@dataclass(frozen=True)
class Modules:
    """The modules of the library by dotted name.

    Attributes:
        files: the file of each module.
    """

    files: dict[str, Path]

    @classmethod
    @cache
    def read(cls) -> Modules:
        files = {}
        for path in sorted((ROOT / LIBRARY).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        return cls(files)

    def is_package(self, module: str) -> bool:
        return module in self.files and self.files[module].name == "__init__.py"

    def imports(self) -> Iterator[Import]:
        """Yield all imports of the library from itself."""
        for path in self.files.values():
            yield from (each for each in imports_of(path) if each.target.split(".")[0] == LIBRARY)

    def loaded(self, each: Import) -> str:
        """Return the module that an import reads its name from."""
        inner = f"{each.target}.{each.name}"
        return inner if inner in self.files and each.name not in self.face(each.target) else each.target

    def face(self, package: str) -> frozenset[str]:
        """Return the names that a package's `__init__` has."""
        return _names(self.files[package]) if self.is_package(package) else frozenset()

    def units(self) -> set[str]:
        """Return the packages and modules directly below the library."""
        return {unit(module) for module in self.files}


@cache
def _names(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def unit(module: str) -> str:
    """Return the package or loose module that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@cache
def graph() -> dict[str, dict[str, list[Import]]]:
    """Return the imports between units, by the importing and the imported unit."""
    modules = Modules.read()
    found: dict[str, dict[str, list[Import]]] = {name: {} for name in modules.units()}
    for each in modules.imports():
        other = unit(each.target if each.target != LIBRARY else f"{LIBRARY}.{each.name}")
        if other != unit(each.module):
            found[unit(each.module)].setdefault(other, []).append(each)
    return found


def circles() -> list[list[str]]:
    """Return the groups of files that import each other in a circle; the `__init__` of a package is left out."""
    modules = Modules.read()
    edges: dict[str, set[str]] = {}
    for each in modules.imports():
        loaded = modules.loaded(each)
        if not modules.is_package(each.module) and not modules.is_package(loaded):
            edges.setdefault(each.module, set()).add(loaded)
    return [circle for circle in _components(edges) if len(circle) > 1]


def _components(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components (Tarjan, SIAM J. Comput. 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in number:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == number[node]:
            index = stack.index(node)
            found.append(sorted(stack[index:]))
            del stack[index:]

    for node in sorted(edges):
        if node not in number:
            visit(node)
    return found


# -----------------------------------------------------------------------------
# The picture
# -----------------------------------------------------------------------------


def picture() -> str:
    """Return the picture as Markdown: a diagram without the arrows that others imply, and a table."""
    below = {name: set(others) for name, others in graph().items() if name not in ("__init__", "__main__")}
    shown = [name for name in ORDER if name in below]
    arrows = [f"    {name} --> {other}" for name in reversed(shown) for other in _direct(name, below)]
    rows = [f"| `{name}` | {_first_line(name)} |" for name in reversed(shown)]
    return "\n".join(
        [
            "",
            "```mermaid",
            "flowchart TD",
            *arrows,
            "```",
            "",
            "| package | holds |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def _direct(name: str, below: dict[str, set[str]]) -> list[str]:
    """Return the imports of a unit that no other of its imports has."""
    inherited = set().union(*(_all_below(other, below) for other in below[name]))
    return sorted(below[name] - inherited, key=ORDER.index)


def _all_below(name: str, below: dict[str, set[str]]) -> set[str]:
    return below[name].union(*(_all_below(other, below) for other in below[name]))


def _first_line(name: str) -> str:
    module = Modules.read().files[f"{LIBRARY}.{name}"]
    return (ast.get_docstring(parsed(module)) or "").splitlines()[0].rstrip(".")


def with_picture(text: str) -> str:
    """Return a text with the picture between its two marks."""
    return with_part(text, BEGIN, picture(), END)


if __name__ == "__main__":
    document = ROOT / "CONTRIBUTING.md"
    document.write_text(with_picture(document.read_text()))
    sys.exit(0)
