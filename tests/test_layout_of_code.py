"""Who may import whom: two packages in one direction, sub-packages in layers, and nothing optional at import."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Each imports from those on its left alone; a sub-package that is not named here lies beside them.
LAYERS = [
    "collectives",
    "tracing",
    "program",
    "partition",
    "transforms",
    "runtime",
    "staging",
    "compile",
    "training",
    "search",
    "cli",
]


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """What a module imports, as absolute dotted names, inside functions too."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            yield from ((*module, alias.name) for alias in node.names)


def unit(path: Path) -> str:
    """The sub-package or module directly below functional_parallel that a file belongs to."""
    return path.relative_to(ROOT / "functional_parallel").with_suffix("").parts[0]


def edges() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "functional_parallel").rglob("*.py"):
        if unit(path) in ("__init__", "__main__"):
            continue
        inside = (name[1] for name in imports(path) if name[0] == "functional_parallel" and len(name) > 1)
        found.setdefault(unit(path), set()).update(name for name in inside if name != unit(path))
    return found


def test_specs_know_nothing_of_programs() -> None:
    for path in (ROOT / "sharding_specs").rglob("*.py"):
        for name in imports(path):
            assert name[0] != "functional_parallel", path
            assert name[:2] != ("torch", "distributed"), path


def test_sub_packages_import_in_one_direction() -> None:
    graph = edges()
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle
    for name in set(LAYERS) & set(order):
        above = LAYERS[LAYERS.index(name) + 1 :]
        assert not graph.get(name, set()) & set(above), f"{name} imports from a layer above it"


def test_importing_loads_nothing_optional() -> None:
    """torch, optree and einops alone; what examples and tests want is loaded by those who use it."""
    optional = ["tqdm", "matplotlib", "hypothesis", "safetensors", "transformers", "pytest", "functional_parallel.cli"]
    code = (
        f"import sys, torch, optree, einops; before = set(sys.modules); import functional_parallel, sharding_specs; "
        f"print([name for name in {optional} if name in set(sys.modules) - before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_private_torch_stays_in_one_place() -> None:
    """Imports of torch's underscored modules; `tests/private_torch` watches that one package."""
    guilty = [
        (path.name, ".".join(name))
        for path in (ROOT / "functional_parallel").rglob("*.py")
        for name in imports(path)
        if name[0] == "torch" and any(part.startswith("_") for part in name[1:]) and path.parent.name != "_torch"
    ]
    assert not guilty
