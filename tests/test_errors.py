"""All errors are in `fp.errors`, and have one base class beside that of Python."""

from __future__ import annotations

import ast

import pytest

import functional_parallel as fp
from sharding_specs import errors as of_specs

from .layout_of_code import ROOT

NAMES = sorted(set(fp.errors.__all__) - {"Error"})
INTERNAL = {"CannotDeferError", "UsageError", "_InsideCopyError"}  # caught where they are raised


@pytest.mark.parametrize("name", NAMES)
def test_an_error_has_the_base_class_and_one_of_python(name: str) -> None:
    found = getattr(fp.errors, name)
    base = Warning if name.endswith("Warning") else fp.errors.Error
    assert issubclass(found, base)
    own = [each for each in found.__mro__ if each.__module__ == "builtins" and issubclass(each, Exception)]
    assert own[0] is not Exception
    assert found.__doc__ and getattr(fp, name, found) is found


def test_no_error_is_defined_elsewhere() -> None:
    files = [*(ROOT / "functional_parallel").rglob("*.py"), *(ROOT / "sharding_specs").rglob("*.py")]
    found = {
        node.name: path.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Warning"))
    }
    assert {name for name, file in found.items() if file != "errors.py"} == INTERNAL
    assert set(found) - INTERNAL == set(fp.errors.__all__)
    assert set(of_specs.__all__) == {"Error", "MeshError", "SpecError", "SpecWarning"}
