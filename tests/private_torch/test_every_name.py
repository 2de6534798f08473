"""No private torch API without a test: when one here fails after an upgrade of torch, `_torch` is the place to look."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from functional_parallel import _torch


def test_every_name_is_tested_here() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    names = [name for name, each in vars(_torch).items() if name[0] != "_" and not isinstance(each, ModuleType)]
    assert "FakeTensorMode" in names and [name for name in names if f"_torch.{name}" not in text] == []
