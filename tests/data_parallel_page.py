"""The tables of docs/data_parallel.md, computed: the phases of DataParallel and DDP, and four predicted times.

`python -m tests.data_parallel_page` writes them into the page.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import optree
import torch

import functional_parallel as fp
from functional_parallel.quantities import readable_bytes
from sharding_specs import Mesh, split

from .written import with_part

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import gpt

__all__ = ["MACHINES", "PAGE", "PUBLISHED", "programs", "seconds", "tables", "with_tables"]

PAGE = Path(__file__).parent.parent / "docs" / "data_parallel.md"
BEGIN, END = "<!-- tables: written by python -m tests.data_parallel_page -->", "<!-- end of tables -->"
STEPS, RANKS, SEQUENCES = 200, 2, 4
GPT2 = gpt.Config(layers=12, embed=768, heads=12, time=1024, vocab=50257, tied=True)

# Two TITAN RTX: NVIDIA's data sheet; two NVLinks of 25 GB/s in each direction. Without them NCCL sends through the
# host's memory. Rates there are those of two ranks on PCIe 3.0 x16, measured by nccl-tests in NVIDIA/nccl issue 384:
# broadcast 10.3 GB/s, all-reduce 3.9 GB/s in each direction.
_CARD: dict[str, Any] = {
    "flops": {torch.float16: 130e12, torch.float32: 16.3e12},
    "bandwidth": 672e9,
    "capacity": 24 * 10**9,
    "ranks_per_host": 2,
    "between": fp.Line(14e-6, 1 / 1e9),
}
MACHINES = {
    "with NVLink": fp.Hardware("2 × TITAN RTX, NVLink", inside=fp.Line(3.4e-6, 1 / 50e9), **_CARD),
    "without": fp.Hardware(
        "2 × TITAN RTX, host memory", inside=fp.Line(5.7e-6, 1 / 10.3e9), links_share=1.0, both_ways=3.9 / 10.3, **_CARD
    ),
}
PUBLISHED = {("DDP", "with NVLink"): 101.9, ("DataParallel", "with NVLink"): 110.6, ("DDP", "without"): 131.4}


class Phase(NamedTuple):
    """An exchange of a step: what is sent, and the collectives that send it, as (kind, phase)."""

    what: str
    kinds: tuple[tuple[str, str], ...]


PHASES = (
    Phase("batch", (("scatter", "forward"),)),
    Phase("parameters", (("broadcast", "forward"),)),
    Phase("outputs", (("gather", "forward"), ("psum", "forward"))),
    Phase("gradients of outputs", (("scatter", "backward"),)),
    Phase("gradients of parameters", (("reduce", "backward"), ("psum", "backward"))),
)
PLANS = {"DataParallel": fp.data_parallel("data", master=0), "DDP": fp.data_parallel("data")}


@cache
def programs() -> dict[str, Any]:
    """Training steps of GPT-2 (124 million parameters), four sequences per rank, on two ranks."""
    params, _ = split(gpt.init(GPT2))
    params = optree.tree_map(lambda leaf: torch.empty_like(leaf, device="meta"), params)
    tokens = torch.empty(RANKS * SEQUENCES, GPT2.time + 1, dtype=torch.int64, device="meta")
    loss = partial(gpt.loss, config=GPT2)
    steps = ((name, fp.train_step(loss, fp.optim.adamw(5e-5), Mesh(data=RANKS), plan)) for name, plan in PLANS.items())
    return {name: step.lower(params, tokens) for name, step in steps}


def seconds(plan: str, machine: str) -> float:
    """Predicted seconds of all steps."""
    return STEPS * float(programs()[plan].price(MACHINES[machine]).seconds)


def tables() -> str:
    return "\n".join([*_phases(), "", *_memory(), "", *_times()])


def _phases() -> list[str]:
    lines = ["| a step sends | " + " | ".join(PLANS) + " |", "|---|---|---|"]
    seen = set()
    for phase in PHASES:
        cells = []
        for name in PLANS:
            found = [one for one in programs()[name].collectives() if (one.kind, one.phase) in phase.kinds]
            seen.update((name, one.node) for one in found)
            kinds = ", ".join(dict.fromkeys(one.kind for one in found))
            cells.append(f"{kinds} {readable_bytes(sum(one.bytes for one in found))}" if found else "–")
        lines.append(f"| {phase.what} | " + " | ".join(cells) + " |")
    every = {(name, one.node) for name in PLANS for one in programs()[name].collectives()}
    assert every == seen, "a collective is in no phase"
    sums = (readable_bytes(sum(programs()[name].bytes_sent().values())) for name in PLANS)
    return [*lines, "| **together** | " + " | ".join(sums) + " |"]


def _memory() -> list[str]:
    lines = ["| bytes at the peak | rank 0 | rank 1 |", "|---|---|---|"]
    for name in PLANS:
        peaks = (readable_bytes(programs()[name].memory(rank).peak) for rank in range(RANKS))
        lines.append(f"| {name} | " + " | ".join(peaks) + " |")
    return lines


def _times() -> list[str]:
    lines = [f"| {STEPS} steps | published | predicted |", "|---|---|---|"]
    cases = sorted(((name, machine) for name in PLANS for machine in MACHINES), key=lambda case: seconds(*case))
    for case in cases:
        published = f"{PUBLISHED[case]:.1f} s" if case in PUBLISHED else "not published"
        lines.append(
            f"| {case[0]} {case[1]}{' NVLink' * (case[1] == 'without')} | {published} | {seconds(*case):.1f} s |"
        )
    return lines


def with_tables(text: str) -> str:
    """Return the text of the page with its tables computed again."""
    return with_part(text, BEGIN, f"\n\n{tables()}\n\n", END)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
