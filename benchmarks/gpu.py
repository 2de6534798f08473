"""Everything that a GPU is needed for, in about eight minutes: tests, equality with the CPU, speed, memory.

    python benchmarks/gpu.py                          # prints tables
    python benchmarks/gpu.py --part speed --write     # and writes them into docs/benchmarks.md
    python benchmarks/gpu.py --short                  # toys on the CPU, as without a GPU: does the script work?

The checkout alone is enough, with the packages that the tests need: torch with CUDA, optree, einops, numpy, hypothesis,
expecttest, pytest and pytest-xdist; Triton for inductor. `--write` writes a table with the card, torch's version and
the date above it, and writes nothing for toys.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import report
import torch

PARTS = ("tests", "equal", "speed", "memory")


def tables(parts: list[str], device: str, short: bool) -> dict[str, Callable[[], str]]:
    """Return the functions that make the tables of the chosen parts, by section of the page."""
    from gpu_equal import equal_table
    from gpu_speed import contest, dropout_table, kernel_table, memory_table, speed_table
    from gpu_tests import tests_table

    rows: list[dict[str, object]] = []

    def contested() -> list[dict[str, object]]:
        if not rows:
            rows.extend(contest(device, short, "speed" in parts))
        return rows

    by_part = {
        "tests": {"gpu tests": lambda: tests_table(short)},
        "equal": {"gpu equal": lambda: equal_table(device, short)},
        "speed": {
            "gpu speed": lambda: speed_table(contested()),
            "gpu kernels": lambda: kernel_table(contested()),
            "gpu dropout": lambda: dropout_table(device, short),
        },
        "memory": {"gpu memory": lambda: memory_table(contested())},
    }
    return {section: make for part in PARTS if part in parts for section, make in by_part[part].items()}


def machine(device: str) -> str:
    card = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    return f"{card}, torch {torch.__version__}, {datetime.datetime.now(datetime.timezone.utc).date()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--short", action="store_true", help="toys on the CPU; always without a GPU")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    options = parser.parse_args()
    short = options.short or not torch.cuda.is_available()
    device = "cpu" if short else "cuda"
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    if short:
        print("toys on the CPU: their numbers mean nothing")
    for section, make in tables(options.part, device, short).items():
        began = time.perf_counter()
        text = make()
        print(f"\n## {section}: {machine(device)}, {time.perf_counter() - began:.0f} s\n\n{text}", flush=True)
        if options.write and not short:
            report.write(section, f"{machine(device)}\n\n{text}")


if __name__ == "__main__":
    main()
