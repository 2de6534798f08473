"""Residuals in another form: the same bits, and the memory of what is stored, with and without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import functional_parallel as fp
from functional_parallel.ir import Aval, info, residuals
from functional_parallel.passes import SplitResiduals, StoredResiduals
from functional_parallel.requests import RunPass
from sharding_specs import Mesh, P

from ..pipelines.test_memory import OneRank
from ..program.test_memory import measured

MESH = Mesh(pipe=2, tensor=2)
SPECS = [{"a": P(None, "tensor"), "b": P("tensor", None)}] * 4
SPLIT = SplitResiduals("tensor", 1)
SCHEDULES = ["1f1b", "gpipe", "zb-h1", "interleaved"]


@dataclass(frozen=True)
class Halves(StoredResiduals):
    """Store float64 as two tensors with half of its bits each."""

    name: ClassVar[str] = "halves"

    def chosen(self, values: Sequence[fx.Node], mesh: Mesh) -> Sequence[fx.Node]:
        return [value for value in values if info(value).aval.dtype == torch.float64 and info(value).aval.ndim > 0]

    def pack(self, value: Tensor) -> Sequence[Tensor]:
        bits = value.contiguous().view(torch.int32).unflatten(-1, (-1, 2))
        return [bits[..., 0].clone(), bits[..., 1].clone()]

    def unpack(self, parts: Sequence[Tensor], like: Aval) -> Tensor:
        return torch.stack(list(parts), -1).flatten(-2).view(torch.float64)


def loss(params: Any, x: Tensor) -> Tensor:
    for layer in params:
        x = torch.relu(x @ layer["a"]) @ layer["b"] + x
        x = x * x.clamp(-1, 1)
    return x.sum()


def arguments(seed: int, rows: int = 8) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).double()

    return [{"a": draw(4, 8), "b": draw(8, 4)} for _ in SPECS], draw(rows, 4, 4)


def step(schedule: str | None, *passes: StoredResiduals) -> Any:
    f = fp.tensor_parallel("tensor", SPECS)(loss)
    f = f.requesting(*map(RunPass, passes))
    mesh = Mesh(tensor=2)
    if schedule is not None:
        f, mesh = fp.pipeline("pipe", schedule=schedule, microbatches=4)(f), MESH
    return fp.compile(fp.grad_and_value(f), mesh)


def equal(one: Any, other: Any) -> bool:
    return all(map(torch.equal, optree.tree_leaves(one), optree.tree_leaves(other)))


@settings(max_examples=4)
@given(st.integers(0, 1000), st.sampled_from([None, *SCHEDULES]), st.sampled_from([Halves(), SPLIT]))
def test_the_bits_are_those_of_the_plain_function(seed: int, schedule: str | None, each: StoredResiduals) -> None:
    params, x = arguments(seed)
    changed = step(schedule, each)
    assert equal(changed(params, x), fp.grad_and_value(loss)(params, x))
    assert each.name in changed.program.passes


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.every(2)
def test_the_memory_is_that_of_the_parts(schedule: str | None) -> None:
    """What a stage saves is what the pass stores, predictions are measured, and shards need less."""
    params, x = arguments(0, 64)
    plain = step(schedule).lower(params, x)
    for each in (Halves(), SPLIT):
        program = step(schedule, each).lower(params, x)
        if schedule is None:
            assert measured(program) == program.memory().peak
        else:
            for rank, memory in enumerate(program.memory().ranks):
                assert OneRank(program, rank).peak() == memory.peak
    assert program.memory().peak < plain.memory().peak


def test_the_stage_of_a_pipeline_saves_the_parts() -> None:
    params, x = arguments(0)
    plain, halves = step("1f1b").lower(params, x), step("1f1b", Halves()).lower(params, x)
    for before, after in zip(plain.stages, halves.stages, strict=True):
        types = [info(value).aval.dtype for value in after.after_forward]
        assert torch.float64 in {info(value).aval.dtype for value in before.after_forward}
        assert set(types) <= {torch.int32, torch.bool, torch.float64} and types.count(torch.int32) > 1
        sizes = [sum(info(value).nbytes for value in stage.after_forward) for stage in (before, after)]
        assert sizes[1] <= sizes[0]


def test_residuals_are_what_the_backward_reads() -> None:
    f = fp.grad(fp.data_parallel("data")(lambda w, x: torch.tanh(x @ w).sum()))
    traced = fp.compile(f, Mesh(data=1)).lower(torch.ones(2, 2), torch.ones(2, 2)).traced
    found = {str(node.target): readers for node, readers in residuals(traced).items()}
    assert {"aten.tanh.default"} <= set(found) <= {"aten.tanh.default", "aten.full.default"}  # and the seed
    assert all(info(reader).backward for readers in found.values() for reader in readers)
