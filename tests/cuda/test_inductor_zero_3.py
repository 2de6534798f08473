"""backend="inductor" on a CUDA device under one plan, in a file of its own, because it compiles for a minute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .training import PLANS, needs_cuda, trained

pytestmark = needs_cuda


def test_compiled_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plan, mesh = PLANS["zero 3"]
    found = trained("cuda", plan, mesh, backend="inductor")
    for a, b in zip(found, trained("cpu", plan, mesh), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)
