"""With sequence parallelism a rank saves shards of activations: the published bytes, and two gathers per layer more."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.ir import residuals
from functional_parallel.program import StorageTable
from sharding_specs import Mesh, split

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

TIME, EMBED, RANKS = 256, 1024, 8


def step(layers: int, without: tuple[str, ...] = (), *last: Any, mesh: Mesh | None = None) -> Any:
    config = gpt.Config(layers, EMBED, 16, TIME, sequence_parallel=True)
    params, specs = split(gpt.init(config))
    plan = fp.chain(fp.remat("attention"), fp.tensor_parallel("tensor", specs), *last)
    f = fp.grad_and_value(plan(partial(gpt.loss, config=config)))
    return fp.compile(f, mesh or Mesh(tensor=RANKS), without=without), params


def lowered(layers: int, without: tuple[str, ...] = ()) -> Any:
    compiled, params = step(layers, without)
    return compiled.lower(params, torch.zeros(1, TIME + 1, dtype=torch.int64))


def saved(layers: int, without: tuple[str, ...]) -> float:
    """Bytes that the backward reads of the forward, for elements of 2 bytes, in units of sequence · batch · hidden."""
    program = lowered(layers, without)
    table = StorageTable("", program.traced)
    storages = {each for value in residuals(program.traced) for each in table.storages[value]}
    made = sum(table.sizes[each] for each in storages if each[0].op == "call_function")
    return made / 4 * 2 / (TIME * EMBED)


@pytest.mark.parametrize(
    ("without", "published"),
    [
        # arXiv 2205.05198 §5: 34 sbh/t. The model has no masks of dropout (2), and cheap ops run again: the results of
        # gelu (8) and of norms (4).
        ((), (34 - 2 - 8 - 4) / RANKS),
        (("gather again",), (34 - 2 - 8 - 4) / RANKS + 2 * 2),  # both gathered inputs of a layer
    ],
)
def test_a_layer_saves_what_is_published(without: tuple[str, ...], published: float) -> None:
    found = saved(2, without) - saved(1, without)
    assert published <= found < published + 0.01  # and statistics of norms


def test_two_gathers_per_layer_more() -> None:
    plain, again = lowered(2, ("gather again",)).counts(), lowered(2).counts()
    more = {key: count - plain[key] for key, count in again.items()}
    assert more == {**dict.fromkeys(plain, 0), ("all_gather", ("tensor",)): 2 * 2 + 1}  # and the head's input
    rows = {row.name: row for row in lowered(2).explain(group="pass").rows}
    assert rows["gather again"].after.collectives - rows["gather again"].before.collectives == 2 * 2 + 1


@pytest.mark.parametrize("pipe", [False, True])
def test_the_bits_stay(pipe: bool) -> None:
    last = [fp.pipeline("pipe", microbatches=2)] if pipe else []
    mesh = Mesh(pipe=2, tensor=2) if pipe else Mesh(tensor=2)
    tokens = torch.randint(0, 256, (2, TIME + 1), generator=torch.Generator().manual_seed(0))
    found = []
    for without in ((), ("gather again",)):
        compiled, params = step(2, without, *last, mesh=mesh)
        found.append(optree.tree_leaves(compiled(params, tokens)))
    assert all(map(torch.equal, *found))
