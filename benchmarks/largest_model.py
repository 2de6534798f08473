"""The largest GPT that each plan trains in the memories of a machine, beside the sizes that were published.

    python benchmarks/largest_model.py                  # prints the tables
    python benchmarks/largest_model.py --write          # and puts them into docs/benchmarks.md

The width is fixed, and the depth grows. A program is lowered on tensors without values. From some depth on, which is
checked, its predicted peaks are lines in the depth. So shallow models tell the depth at which a memory of the machine
is full, and the time of a step. For a small machine, which is stated, the largest model of each plan is then trained
for one step here under `fp.Memory`, and with one layer more it is refused; there, refusals tell the depth.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import optree
import report
import torch
from model import GPT, Config, cross_entropy

import functional_parallel as fp
from functional_parallel.program import Program
from sharding_specs import Mesh

V100 = fp.Hardware.named("v100")


@dataclass(frozen=True)
class Machine:
    """Ranks, and bytes of each memory of a rank."""

    name: str
    ranks: int
    memories: Mapping[str, int]
    vocab: int = 50_304
    time: int = 1024
    head: int = 128
    hardware: fp.Hardware = V100
    depths: tuple[int, int, int] = (6, 8, 10)  # of the programs that are lowered
    bucket: int = 512 << 20  # bytes of all ranks, which do not grow with the model


class Case(NamedTuple):
    machine: Machine
    plan: str
    embed: int
    published: float  # billions of parameters


ONE = Machine("1 V100", 1, {"device": 32 * 10**9, "host": 1500 * 10**9})
MANY = Machine("64 V100s", 64, {"device": 32 * 10**9})
DGX2 = Machine(
    "DGX-2, 16 V100s",
    16,
    {"device": 32 * 10**9, "host": 1500 * 10**9 // 16, "disk": 28 * 10**12 // 16},
    hardware=replace(V100, name="dgx-2", ranks_per_host=16),
)
HERE = Machine(
    "here",
    2,
    {"device": 32 << 20, "host": 96 << 20, "disk": 128 << 20},
    vocab=256,
    time=64,
    head=32,
    depths=(3, 4, 5),
    bucket=2 << 20,
)
WIDTH = 256


def plans(folder: str) -> dict[str, Any]:
    half = fp.mixed_precision("fp16", reduce="fp16", loss_scale=None)  # 2 + 2 bytes of a parameter, and 12 of Adam
    before = [half, fp.remat()]
    everything = {"parameters": "host", "activations": "host"}
    on_disk = fp.offload(state="disk", parameters="disk", activations="host", path=folder, group="256MiB")
    return {
        "DDP": fp.chain(*before, fp.data_parallel("data")),
        **{f"ZeRO-{stage}": fp.chain(*before, fp.zero(stage, "data")) for stage in (1, 2, 3)},
        "ZeRO-2, state on the host": fp.chain(*before, fp.zero(2, "data"), fp.offload(state="host")),
        "ZeRO-3, all on the host": fp.chain(
            *before, fp.zero(3, "data", prefetch=0), fp.offload(state="host", **everything)
        ),
        "ZeRO-3, all on disk": fp.chain(*before, fp.zero(3, "data", prefetch=0), on_disk),
    }


# Sizes: ZeRO-Offload (arXiv 2101.06840, abstract), ZeRO (arXiv 1910.02054, table 2: states alone, in theory), and
# ZeRO-Infinity (arXiv 2104.07857, section 8 and figure 6a).
CASES = [
    Case(ONE, "DDP", 2048, 1.4),
    Case(ONE, "ZeRO-2, state on the host", 4096, 13),
    Case(MANY, "DDP", 2048, 2),
    Case(MANY, "ZeRO-1", 4096, 7.6),
    Case(MANY, "ZeRO-2", 4096, 14.4),
    Case(MANY, "ZeRO-3", 8192, 128),
    Case(DGX2, "ZeRO-2, state on the host", 4096, 13),
    Case(DGX2, "ZeRO-3", 8192, 20),
    Case(DGX2, "ZeRO-3, all on the host", 8192, 100),
    Case(DGX2, "ZeRO-3, all on disk", 25600, 1000),
]


class Model:
    """Programs of GPTs of one width on a machine, one sequence per rank."""

    def __init__(self, machine: Machine, plan: Any, embed: int) -> None:
        self.machine, self.plan, self.embed = machine, plan, embed
        self.peaks: dict[int, Mapping[str, int]] = {}  # by depth

    def make(self, layers: int, device: str = "meta") -> Any:
        """The training step, its parameters and a batch."""
        machine = self.machine
        config = Config("", layers, self.embed, self.embed // machine.head, machine.time, 1, machine.vocab)
        with torch.device(device):
            module = GPT(config)
            tokens = torch.ones(machine.ranks, config.time + 1, dtype=torch.int64)
        model, params = fp.functional(module)
        limits = fp.Memory(**machine.memories) if device == "cpu" else None
        options = {"donate": True, "bucket": machine.bucket // machine.ranks}
        train = fp.train_step(
            partial(_loss, model), fp.optim.adamw(1e-4), self.mesh, self.plan, memory=limits, **options
        )
        return train, params, tokens

    def refused(self, layers: int) -> str:
        """The memory for which a model is too large, or nothing."""
        train, params, tokens = self.make(layers, "cpu")
        try:
            train.lower(params, tokens)
        except fp.BudgetError as error:
            return str(error).partition("memory '")[2].partition("'")[0]
        return ""

    @property
    def mesh(self) -> Mesh:
        return Mesh(data=self.machine.ranks)

    def lower(self, layers: int) -> Program:
        train, params, tokens = self.make(layers)
        program = train.lower(params, tokens)
        self.peaks[layers] = program.memory().peaks
        return program

    def parameters(self, layers: int) -> int:
        return sum(x.numel() for x in optree.tree_leaves(self.make(layers)[1]))

    def largest(self) -> tuple[int, Program]:
        """The depth at which a memory is full, and the deepest program that was lowered for it."""
        depths = list(self.machine.depths)
        programs = [self.lower(layers) for layers in depths]
        while self.machine is not HERE and not self.has_lines(*depths[-3:]):
            depths.append(depths[-1] + 4)
            programs.append(self.lower(depths[-1]))
        (before, low), (last, high) = sorted(self.peaks.items())[-2:]
        found = []
        for memory, size in self.machine.memories.items():
            slope = (high.get(memory, 0) - low.get(memory, 0)) / (last - before)
            found += [int(last + (size - high[memory]) // slope)] if slope > 0 else []
        return max(min(found), 1), programs[-1]

    def has_lines(self, *depths: int) -> bool:
        """Whether the peak of each memory is a line through three depths, within 2 %."""
        (a, b, c), found = depths, [self.peaks[layers] for layers in depths]
        slopes = [
            ((x.get(name, 0) - w.get(name, 0)) / (b - a), (y.get(name, 0) - x.get(name, 0)) / (c - b))
            for name in self.machine.memories
            for w, x, y in [found]
        ]
        return all(abs(first - second) <= 0.02 * abs(second) for first, second in slopes)


def _loss(model: Any, params: Any, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(params, tokens[:, :-1]), tokens)


def planned(case: Case) -> list[object]:
    machine = case.machine
    with tempfile.TemporaryDirectory() as folder:
        model = Model(machine, plans(folder)[case.plan], case.embed)
        layers, program = model.largest()
        found, lowered = (model.parameters(depth) / 1e9 for depth in (layers, max(model.peaks)))
    rate = lowered / program.price(machine.hardware).seconds
    size, ratio = f"{found:.3g}" if found < 1000 else f"{found:.0f}", f"{found / case.published:.2f}"
    return [machine.name, case.plan, f"{layers} × {case.embed}", size, case.published, ratio, f"{found / rate:.1f}"]


def trained(plan: str, folder: str) -> list[object]:
    """A row of the machine that is stated for this one."""
    model = Model(HERE, plans(folder)[plan], WIDTH)
    layers = model.largest()[0]
    while not (full := model.refused(layers + 1)):
        layers += 1
    while model.refused(layers):  # if the peak of few layers is at another op
        layers -= 1
    train, params, tokens = model.make(layers, "cpu")
    _, metrics = train(train.init(params), tokens)
    peaks = [f"{train.program.memory().peaks.get(name, 0) / 2**20:.1f}" for name in HERE.memories]
    size = f"{model.parameters(layers) / 1e6:.1f}"
    return [plan, layers, size, *peaks, f"{metrics.loss.item():.2f}", full]


def shown(row: list[object]) -> list[object]:
    print(*row, sep="; ", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    parser.add_argument("--part", choices=["planned", "here"], nargs="*", default=["planned", "here"])
    args = parser.parse_args()
    sections = {}
    if "planned" in args.part:
        head = ("machine", "plan", "layers × width", "10⁹", "published", "ratio", "step, s")
        sections["largest planned"] = report.table(head, [shown(planned(case)) for case in CASES])
    if "here" in args.part:
        head = ("plan", "layers", "10⁶", "device, MiB", "host", "disk", "loss", "one layer more is refused for")
        with tempfile.TemporaryDirectory() as folder:
            sections["largest here"] = report.table(head, [shown(trained(name, folder)) for name in plans(folder)])
    for name, text in sections.items():
        print(f"{text}\n")
        if args.write:
            report.write(name, text)


if __name__ == "__main__":
    main()
