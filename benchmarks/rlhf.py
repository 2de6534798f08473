"""Rewards of the examples of reinforcement learning, on three meshes each, as tables for docs/rlhf.md.

    python benchmarks/rlhf.py --write

All runs compute in float64, so their rewards are equal on all meshes. Seconds are processor time of one process with
one thread, with the ranks simulated and all programs traced.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import report

ROOT = Path(__file__).parent.parent
MESHES = (("data=2,tensor=2", 1), ("data=1", 0), ("data=4", 3))
RUNS = {"GRPO": ("grpo.py",), "PPO": ("ppo.py",), "DPO": ("grpo.py", "--loss", "dpo")}
SHOWN = (0, 5, 10, 20, 30, 40, 50, 59)


def main() -> None:
    args = arguments()
    rows = []
    for name in args.run:
        for mesh in MESHES:
            rows.append(row(name, *mesh, args.steps))
            print(*rows[-1], file=sys.stderr, flush=True)
    shown = [step for step in SHOWN if step < args.steps]
    head = ["run", "mesh", "ZeRO", *(f"step {step}" for step in shown), "held out", "divergence", "seconds"]
    text = report.table(head, rows)
    print(text)
    if args.write:
        report.write("rlhf", text, ROOT / "docs" / "rlhf.md")


def row(name: str, mesh: str, stage: int, steps: int) -> list[str]:
    began = processor_seconds()
    script, *options = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples" / script), *options, "--double", "--mesh", mesh]
        command += ["--zero", str(stage), "--steps", str(steps), "--plot", f"{folder}/plot.png"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    rewards = re.findall(r"\d+: reward (\S+),", said)
    before, after = re.findall(r"held out, \w+: reward (\S+)", said)
    *_, divergence = re.findall(r"divergence ([\d.]+)", said)
    shown = [rewards[step] for step in SHOWN if step < steps]
    seconds = f"{processor_seconds() - began:.0f}"
    return [name, mesh, str(stage), *shown, f"{before} → {after}", divergence, seconds]


def processor_seconds() -> float:
    """Return the processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=RUNS, nargs="+", default=list(RUNS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="put the table into docs/rlhf.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
