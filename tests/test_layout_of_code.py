"""Which package may import which, through its `__init__` alone; and nothing optional at import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .layout_of_code import LIBRARY, LOOSE, ORDER, ROOT, Modules, circles, graph, imports_of, parsed, unit, with_picture
from .measures import methods


def test_specs_know_nothing_of_programs() -> None:
    for path in (ROOT / "sharding_specs").rglob("*.py"):
        for each in imports_of(path):
            assert each.target.split(".")[0] != "functional_parallel", each
            assert f"{each.target}.{each.name}".split(".")[:2] != ["torch", "distributed"], each


def test_every_package_and_loose_module_is_known() -> None:
    modules = Modules.read()
    assert modules.units() == set(ORDER)
    assert {name for name in ORDER if not modules.is_package(f"{LIBRARY}.{name}")} == LOOSE


def test_imports_run_downwards() -> None:
    upward = [
        str(each)
        for own, others in graph().items()
        for other, imports in others.items()
        if ORDER.index(other) > ORDER.index(own)
        for each in imports
    ]
    assert not upward, "imports from a package above:\n" + "\n".join(upward)


def test_imports_between_packages_go_through_init() -> None:
    """`from ..package import name`, where the package's `__init__` has the name."""
    modules = Modules.read()
    past = [
        str(each)
        for others in graph().values()
        for other, imports in others.items()
        if modules.is_package(f"{LIBRARY}.{other}")
        for each in imports
        if each.target != LIBRARY
        and (each.target != f"{LIBRARY}.{other}" or each.name not in modules.face(each.target))
    ]
    assert not past, "imports that bypass an __init__:\n" + "\n".join(past)


def test_no_files_import_each_other() -> None:
    assert not circles()


def test_the_picture_in_contributing_is_that_of_the_code() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert with_picture(text) == text, "run python -m tests.layout_of_code"


def test_large_packages_have_a_readme() -> None:
    """A README of at most 60 lines in every package of more than 1,500 lines."""
    modules = Modules.read()
    for name in ORDER:
        files = [path for module, path in modules.files.items() if unit(module) == name]
        readme = ROOT / LIBRARY / name / "README.md"
        if modules.is_package(f"{LIBRARY}.{name}") and sum(len(path.read_text().splitlines()) for path in files) > 1500:
            assert readme.exists(), f"{name} has no README.md"
        assert not readme.exists() or len(readme.read_text().splitlines()) <= 60, readme


README_FILE = re.compile(r"`([\w]+(?:\.py|/))`")


@pytest.mark.parametrize(
    "readme", sorted((ROOT / LIBRARY).rglob("README.md")), ids=lambda path: str(path.parent.relative_to(ROOT))
)
def test_a_readme_lists_the_files_of_its_folder(readme: Path) -> None:
    rows = [line.split("|")[1] for line in readme.read_text().splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in README_FILE.findall(row)]
    modules = [path.name for path in readme.parent.glob("*.py") if path.name != "__init__.py"]
    packages = [f"{path.parent.name}/" for path in readme.parent.glob("*/__init__.py")]
    assert sorted(listed) == sorted([*modules, *packages])


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
        str(each)
        for path in (ROOT / "functional_parallel").rglob("*.py")
        for each in imports_of(path)
        if each.target.split(".")[0] == "torch"
        and any(part.startswith("_") for part in [*each.target.split(".")[1:], each.name])
        and path.parent.name != "_torch"
    ]
    assert not guilty


def test_facts_about_nodes_are_typed() -> None:
    """Only `ir/info.py` touches `node.meta`; every other module reads and writes a `NodeInfo`."""
    guilty = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / LIBRARY).rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr == "meta" and path.name != "info.py"
    ]
    assert not guilty


def test_a_training_step_has_few_methods() -> None:
    """Counted with those of its bases; its states and programs have the others."""
    trees = [parsed(path) for path in (ROOT / LIBRARY / "training").glob("*.py")]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert len(methods(classes, "TrainStep")) <= 25


def test_a_name_is_used_once() -> None:
    """Files and classes. The errors of both libraries are in a file of one name."""
    paths = [path for library in (LIBRARY, "sharding_specs") for path in (ROOT / library).rglob("*.py")]
    files = Counter(path.name for path in paths if path.name not in ("__init__.py", "errors.py"))
    nodes = (node for path in paths for node in ast.walk(parsed(path)))
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert not [name for counts in (files, classes) for name, count in counts.items() if count > 1]
