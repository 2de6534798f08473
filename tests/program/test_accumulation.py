"""The table of docs/memory.md: what accumulation sends and holds, at every ZeRO stage, read off programs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.ir import forward_nodes, info
from functional_parallel.program.memory import StorageTable
from sharding_specs import Mesh

PAGE = Path(__file__).parent.parent.parent / "docs" / "memory.md"
ROW = re.compile(r"^\| ([0-3, ]+)(, `keep_gathered`)? \| (once|each) \| (\S+) \| (\S+) \| (\S+) \|$", re.MULTILINE)
ROWS = [
    (int(stage), bool(kept), reduce, sent)
    for stages, kept, reduce, *sent in ROW.findall(PAGE.read_text())
    for stage in stages.split(", ")
]
WIDTH = 16


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["up"]) @ layer["down"]
    return (x**2).mean()


def parameters() -> Any:
    return {"layers": [{"up": torch.randn(WIDTH, 32), "down": torch.randn(32, WIDTH)} for _ in range(3)]}


def lowered(stage: int, kept: bool, reduce: str, ranks: int, microbatches: int) -> Any:
    plan = fp.chain(fp.zero(stage, "data", keep_gathered=kept), fp.accumulate(microbatches, reduce=reduce))
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=ranks), plan, bucket=None)
    return train.lower(train.init(parameters()), torch.randn(8 * ranks * microbatches, WIDTH))


def sent(program: Any, *kinds: str) -> int:
    return sum(one.bytes for one in program.collectives() if one.kind in kinds and one.operand.numel > 1)


def held(program: Any) -> int:
    """The most bytes of gradients that live while a product of the forward runs."""
    ledger, forward = StorageTable("", program.traced), set(forward_nodes(program.traced))
    number = {node: index for index, node in enumerate(ledger.nodes)}
    lives: dict[Any, list[int]] = {}
    for node in ledger.nodes:
        for storage in ledger.storages[node]:
            maker = storage[0]
            if maker in number and maker not in forward and not info(maker).recomputed:
                uses = [number[user] for user in node.users if user in number]
                lives.setdefault(storage, []).extend([number[maker], *uses])
    products = [number[node] for node in forward if node.target is torch.ops.aten.mm.default]
    spans = {storage: (min(uses), max(uses)) for storage, uses in lives.items()}
    return max(sum(ledger.sizes[s] for s, (born, dies) in spans.items() if born < at <= dies) for at in products)


def test_the_table_has_every_stage() -> None:
    assert {(stage, reduce) for stage, _, reduce, _ in ROWS} == {(s, r) for s in range(4) for r in ("once", "each")}
    assert len(ROWS) == 10


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 2)])
@pytest.mark.parametrize(
    ("stage", "kept", "reduce", "entries"), ROWS, ids=lambda x: "-".join(x) if isinstance(x, list) else str(x)
)
def test_a_row(stage: int, kept: bool, reduce: str, entries: list[str], ranks: int, microbatches: int) -> None:
    program = lowered(stage, kept, reduce, ranks, microbatches)
    size = sum(leaf.nbytes for leaf in optree.tree_leaves(parameters()))
    scope = {"n": microbatches, "N": ranks}
    gradients, params, share = (eval(entry.replace("2n", "2*n"), scope) for entry in entries)
    unit = size * (ranks - 1) // ranks
    assert sent(program, "psum", "psum_scatter") == gradients * unit
    first = 4 * WIDTH * 32 * (ranks - 1) // ranks  # the first layer's input needs no gradient: not gathered for it
    assert sent(program, "all_gather") == params * unit - (microbatches * first if params == 2 * microbatches else 0)
    assert held(program) == share * size
