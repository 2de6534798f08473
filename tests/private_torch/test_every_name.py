"""No private torch API without a test: when one here fails after an upgrade of torch, `_torch` is the place to look."""

from __future__ import annotations

from pathlib import Path

from functional_parallel import _torch


def test_every_name_is_tested_here() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    assert [name for name in _torch.__all__ if f"_torch.{name}" not in text] == []
