"""What each pass does can be seen, and each can be switched off."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh

from ..passes.networks import SPLIT, batch, loss, parameters

MESH = Mesh(data=2, tensor=2)
PLAN = fp.chain(
    fp.mixed_precision("bf16"),
    fp.remat(),
    fp.tensor_parallel("tensor", SPLIT),
    fp.zero(3, "data"),
    fp.accumulate(2, reduce="each"),
)
PASSES = (
    *("axes of one rank", "simplify"),
    *("sums once", "casts", "reduction types", "stored types", "reduce each microbatch", "microbatches"),
    *("recompute", "gather again", "remat", "turned", "gathers", "reductions", "cheap ops again"),
    *("buckets", "in place", "folded", "views"),
)
REQUIRED = ("axes of one rank", "simplify", "microbatches")


@cache
def program(without: tuple[str, ...] = ()) -> Any:
    train = fp.train_step(loss, fp.optim.adamw(1e-2), MESH, PLAN, bucket=1 << 10, without=without)
    return train.lower(train.init(parameters(2)), *batch(512))


@cache
def table() -> Any:
    return program().explain(group="pass")


@cache
def gradients(without: tuple[str, ...] = ()) -> Any:
    """In float64, on a batch of 16."""
    plan = fp.chain(*PLAN.transforms[1:])
    step = fp.compile(fp.grad_and_value(plan(loss)), MESH, without=without, bucket=1 << 10)
    return step(parameters(2), *batch(16))


def test_a_row_per_pass() -> None:
    found, rows = program(), table().rows
    assert found.passes == PASSES
    assert tuple(dict.fromkeys(row.name for row in rows)) == PASSES
    for row, following in pairwise(rows):
        assert row.after == following.before
    last = rows[-1].after
    assert last.ops == len(list(found.traced.nodes))
    assert last.collectives == len(found.collectives())
    assert last.bytes_sent == sum(found.bytes_sent().values())
    assert last.peak == found.memory().peak


def test_passes_do_what_their_names_say() -> None:
    rows = {row.name: row for row in table().rows}
    assert rows["casts"].after.bytes_sent < rows["casts"].before.bytes_sent
    assert rows["remat"].after.ops > rows["remat"].before.ops
    assert rows["remat"].after.peak < rows["remat"].before.peak
    assert rows["buckets"].after.collectives < rows["buckets"].before.collectives
    assert rows["buckets"].after.bytes_sent == rows["buckets"].before.bytes_sent
    assert rows["recompute"].after == rows["recompute"].before  # nothing is marked


def test_the_table_prints_and_travels() -> None:
    lines = str(table()).splitlines()
    assert lines[0] == f"train_step on {MESH!r}"
    assert lines[2].split() == ["pass", "ops", "collectives", "bytes", "sent", "peak", "of", "live", "tensors"]
    (remat,) = (line for line in lines if line.startswith("remat"))
    row = next(row for row in table().rows if row.name == "remat")
    assert f"{row.before.ops} → {row.after.ops}" in remat
    assert json.loads(table().json())["rows"][6]["after"]["peak"] == table().rows[6].after.peak


def test_text_before_and_after() -> None:
    found = program()
    plain = [text.splitlines() for text in (found.after("views"), str(found))]
    assert [line.split("  # ")[0] for line in plain[0]] == [line.split("  # ")[0] for line in plain[1]]
    assert found.after("gathers") == found.before("reductions")
    assert "pack(" not in found.before("buckets")
    assert "pack(" in found.after("buckets")
    gathers = [line for line in found.before("casts").splitlines() if "all_gather" in line]
    assert gathers and not any("bf16" in line for line in gathers)
    with pytest.raises(
        ValueError, match=r"no pass 'bucket' ran; there ran 'axes of one rank', .*'buckets', 'in place', .*'views'"
    ):
        found.before("bucket")


@pytest.mark.parametrize("name", sorted(set(PASSES) - set(REQUIRED)))
@pytest.mark.every(2)
def test_each_can_be_switched_off(name: str) -> None:
    """The rest run as before, and the numbers stay: to the bit where nothing is rounded otherwise."""
    found = program(without=(name,))
    assert found.passes == tuple(each for each in PASSES if each != name)
    with pytest.raises(ValueError, match=f"no pass '{name}' ran"):
        found.after(name)
    torch.testing.assert_close(gradients((name,)), gradients(), rtol=1e-12, atol=1e-14)


def test_a_rewrite_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"without=\['bucket'\]: no passes that .*: 'buckets', 'casts'"):
        program(without=("bucket", "gathers"))


@pytest.mark.parametrize("name", REQUIRED)
def test_a_program_cannot_do_without_some(name: str) -> None:
    with pytest.raises(ValueError, match=rf"without=\['{name}'\]: no passes that can be left out"):
        program(without=(name,))


def test_a_program_keeps_no_arguments() -> None:
    x, y = batch(64)
    step = fp.compile(fp.grad_and_value(fp.data_parallel("data")(loss)), Mesh(data=2))
    found, alive = step.lower(parameters(2), x, y), weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
    assert found.explain(group="pass").rows[-1].after.peak == found.memory().peak


def test_a_program_of_unknown_making() -> None:
    found = copy.copy(program())
    found.lowering = None
    with pytest.raises(ValueError, match=r"train_step was not made by fp\.compile"):
        found.explain(group="pass")
    with pytest.raises(ValueError, match="it is 'line', 'axis' or 'pass'"):
        found.explain(group="source")
