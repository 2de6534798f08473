"""The benchmarks' own parts, and (slow) one whole run of the comparison with a peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ROW = {"name", "config", "ranks", "ours_s", "peer_s", "ratio", "ideal_ratio", "losses_equal"}
ALONE = {f"{side}_{key}" for side in ("ours", "peer") for key in ("sent_bytes", "peak_bytes", "start_s")}


@pytest.fixture(autouse=True)
def scripts_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(BENCHMARKS / "compare.py"), "--json", "--rounds", "2", *arguments]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.slow
def test_a_comparison_gives_rows_with_equal_losses_and_the_bytes_of_the_program() -> None:
    done = compare("--sizes", "tiny", "--peers", "DDP", "ZBV")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == ["DDP", "ZBV"]
    for row in rows:
        assert row.keys() >= ROW | ALONE | {"bound_ratio", "peer_bound_ratio", "core_flops", "bandwidth"}
        assert row["losses_equal"] is True
    ddp, zbv = rows
    assert ddp["ours_sent_bytes"] == ddp["ours_program_bytes"]
    assert ddp["ours_sent_bytes"] <= ddp["peer_sent_bytes"]
    assert zbv["ours_program_bytes"] / 2 <= zbv["ours_sent_bytes"] < zbv["ours_program_bytes"]  # of two ranks


def test_what_does_not_fit_is_left_out_and_says_why() -> None:
    import compare as script
    from model import SIZES

    assert script.unfit("ZBV", SIZES["wide"], 4) == "2 chunks on each of 4 ranks are 8 stages, and it has 4 layers"
    assert script.unfit("1F1B", SIZES["wide"], 4) is None
    assert script.unfit("ZBV", SIZES["base"], 4) is None
    assert script.unfit("DTensor TP", SIZES["tiny"], 3) == "4 heads do not go into 3 parts"
    assert script.unfit("DDP", SIZES["small"], 3) == "8 samples do not go into 3 parts"


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import optional

    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    assert optional.missing("JAX TP") == "jax is not installed: pip install jax"
    assert str(optional.missing("DeepSpeed ZeRO-1")).endswith("pip install --no-build-isolation deepspeed")
    assert optional.missing("DDP") is None


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_the_peak_is_of_what_was_alive_since_it_was_reset() -> None:
    from resident import peak, reset_peak, resident

    size = 256 << 20
    reset_peak()
    before = resident()
    block = torch.ones(size, dtype=torch.uint8)
    assert abs(peak() - before - size) < size / 8
    del block
    assert abs(peak() - before - size) < size / 8
    reset_peak()
    assert abs(peak() - before) < size / 8


def test_a_line_in_the_bound_is_the_fastest() -> None:
    import machine

    limits = {"ranks": 4, "lines": {"message": [1e-5, 1e9], "all_reduce, shared": [1e-5, 4e9]}}
    assert machine.bound(limits, single=0.4, sent=2e9) == pytest.approx(0.1 + 0.5)


def test_bytes_of_a_program_of_xla() -> None:
    pytest.importorskip("jax")
    from jax_gpt import bytes_sent

    text = (
        "%a = (f32[128,128]{1,0}, f32[4]{0}) all-reduce(%x, %y), channel_id=1\n"
        "%b = f32[8,2]{1,0} all-gather(%z), channel_id=2\n"
        "%c = f32[8]{0} add(%b, %b)\n"
        "ROOT %d = f32[2]{0} reduce-scatter(%c), channel_id=3\n"
    )
    assert bytes_sent(text, 4) == 1.5 * (128 * 128 + 4) * 4 + 0.75 * 64 + 3 * 8
