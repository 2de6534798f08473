"""What a pipeline says of itself: its passes, program by program, and what every microbatch costs anew."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.pipelines import PipelineProgram
from functional_parallel.quantities import readable_bytes
from sharding_specs import Mesh, P

WIDTH, LAYERS, MICROBATCHES = 16, 2, 4


def loss(params: Any, x: Tensor) -> Tensor:
    for layer in params:
        x = x + torch.tanh(x @ layer["in"]) @ layer["out"]
    return (x**2).mean()


@cache
def step(*transforms: Any, schedule: str = "1f1b", **options: Any) -> PipelineProgram:
    params = [{"in": torch.zeros(WIDTH, 2 * WIDTH), "out": torch.zeros(2 * WIDTH, WIDTH)} for _ in range(LAYERS)]
    plan = fp.chain(*transforms, fp.pipeline("pipe", schedule=schedule, microbatches=MICROBATCHES))
    train = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(pipe=2, data=2), plan, **options)
    return train.lower(train.init(params), torch.zeros(64, WIDTH))


# -----------------------------------------------------------------------------
# Phases
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_programs_after_the_pipeline_say_what_they_are_in_the_step(zero: int) -> None:
    """They were cut from the end of a step, where the loss is summed too, and gradients may have been before."""
    program = step(fp.zero(zero, "data"), clip=1.0)
    told: dict[tuple[str, int], set[str]] = {}
    for one in program.collectives():
        told.setdefault((one.kind, one.operand.numel == 1), set()).add(one.phase)
    assert told["psum", True] == {"forward", "update"}  # the loss, and the gradients' norm
    assert told["psum_scatter", False] == {"update" if zero < 3 else "backward"}
    assert told["all_gather", False] == ({"update"} if zero < 3 else {"forward", "backward"})
    assert told["send", False] == {"forward", "backward"}
    assert told["send", True] == {"forward", "update"}  # what the norm is made of, and the loss for who has it not
    price = {(item.what, item.phase) for item in program.price().items if item.axes}
    assert price <= {(kind, phase) for (kind, _), phases in told.items() for phase in phases}
    assert ("psum", "update") in price


# -----------------------------------------------------------------------------
# Passes
# -----------------------------------------------------------------------------


def test_rows_follow_each_program_through_its_passes() -> None:
    program = step(fp.remat(), fp.zero(3, "data"))
    table = program.explain(group="pass")
    by_program: dict[str, list[Any]] = {}
    for row in table.rows:
        by_program.setdefault(row.program, []).append(row)
    assert next(iter(by_program)) == "train_step"
    assert [row.name for row in by_program["train_step"]] == [
        *("axes of one rank", "simplify", "sums once", "layers", "microbatches"),
        *("recompute", "remat", "turned", "gathers"),
        "cheap ops again",  # once it is known which stage keeps what
    ]
    for rows in by_program.values():
        for row, following in itertools.pairwise(rows):
            assert row.after == following.before
    parts = {part.name: part for part, _ in program.programs()}
    for name in set(by_program) & set(parts):
        last, part = by_program[name][-1].after, parts[name]
        assert last.ops == len(list(part.traced.nodes))
        assert (last.collectives, last.bytes_sent) == (len(part.collectives()), sum(part.bytes_sent().values()))
        assert last.peak == part.memory().peak
    (buckets,) = (row for row in by_program["train_step: stage 0, F"] if row.name == "buckets")
    assert buckets.after.collectives < buckets.before.collectives
    assert buckets.after.bytes_sent == buckets.before.bytes_sent


def test_the_table_is_one_and_names_its_programs() -> None:
    table = step(fp.zero(1, "data")).explain(group="pass")
    lines = str(table).splitlines()
    assert lines[2].split()[:3] == ["program", "pass", "ops"]
    assert lines[4].startswith("train_step  ")
    assert any(line.startswith("after the pipeline, rank 1, level 0  buckets") for line in lines)
    assert any("shapes of one microbatch" in line for line in lines)
    assert json.loads(table.json())["rows"][0]["program"] == "train_step"


def test_every_pass_can_be_switched_off() -> None:
    program = step(fp.remat(), fp.zero(3, "data"))
    for name in set(program.passes) - {"axes of one rank", "simplify", "layers", "microbatches"}:
        without = step(fp.remat(), fp.zero(3, "data"), without=(name,))
        assert name not in without.passes
        assert set(without.passes) == set(program.passes) - {name}
    assert "pack(" in str(program) and "pack(" not in str(step(fp.zero(3, "data"), without=("buckets",)))
    with pytest.raises(ValueError, match="no passes that can be left out"):
        step(without=("bucket",))


def test_text_before_and_after() -> None:
    program = step(fp.remat(), fp.zero(3, "data"))
    assert program.after("gathers").startswith("train_step on Mesh")
    before, after = program.before("buckets"), program.after("buckets")
    assert "pack(" not in before and "pack(" in after
    for name in ("stage 0, F", "stage 1, B, adding", "after the pipeline, rank 1"):
        assert f"train_step: {name}" in after
    with pytest.raises(ValueError, match=r"no pass 'bucket' ran; there ran .*'recompute', 'remat'.*'views'"):
        program.before("bucket")


# -----------------------------------------------------------------------------
# Every microbatch anew
# -----------------------------------------------------------------------------

PARAMETERS = LAYERS * 2 * WIDTH * 2 * WIDTH * 4


def total(program: PipelineProgram, kind: str) -> int:
    return program.bytes_sent().get((kind, ("data",)), 0)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_without_gathered_parameters_nothing_is_done_anew(zero: int) -> None:
    program = step(fp.zero(zero, "data"))
    assert program.per_microbatch() == {}
    assert "does anew" not in str(program.explain())
    if zero:
        assert program.bytes_sent() == step(fp.zero(1, "data")).bytes_sent()
        assert total(program, "all_gather") == PARAMETERS // 2  # (N − 1)/N Ψ: new parameters, once


def test_zero_3_gathers_for_every_microbatch_forward_and_backward() -> None:
    """Against ZeRO-1: per microbatch 2 (N − 1)/N Ψ, but for what a stage's forward that nobody asks for leaves out."""
    program, one, kept = (
        step(fp.zero(3, "data")),
        step(fp.zero(1, "data")),
        step(fp.zero(3, "data", keep_gathered=True)),
    )
    count, sent = program.per_microbatch()["all_gather", ("data",)]
    assert sent * MICROBATCHES == total(program, "all_gather")
    assert PARAMETERS // 2 < sent <= 2 * PARAMETERS // 2
    assert total(program, "psum_scatter") == total(one, "psum_scatter") == PARAMETERS // 2
    assert kept.per_microbatch() == {} and total(kept, "all_gather") == total(one, "all_gather")
    assert program.per_microbatch().keys() == {("all_gather", ("data",))}
    text = str(program.explain())
    assert f"{count:g} all_gather over data, {readable_bytes(round(sent))}" in text
    assert "does anew: " in text


def test_tensor_parallel_sums_are_done_for_every_microbatch() -> None:
    program = step(fp.tensor_parallel("data", {"*/in": P(None, "data"), "*/out": P("data")}))
    counts = program.counts()["psum", ("data",)]
    assert program.per_microbatch()["psum", ("data",)][0] * MICROBATCHES <= counts
    assert program.per_microbatch()["psum", ("data",)][0] >= LAYERS
