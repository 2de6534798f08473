"""Partitioned activations: the bits of the plan without, shards of what is saved, and the volume that is published."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh, MeshError, P

from ..pipelines.test_memory import OneRank
from ..processes import run_on_processes
from ..program.test_memory import measured

RULES = {"*/a": P(None, "tensor"), "*/b": P("tensor"), "*": P()}
POLICIES = [(), (fp.remat(),), (fp.remat(every=2),), (fp.remat("attention"),), (fp.remat("nothing"),)]
SCHEDULES = ["1f1b", "gpipe", "zb-h1", "interleaved"]
WIDTH = 6


def loss(params: Any, x: Tensor) -> Tensor:
    """Blocks with a norm and dropout, whose results have several parts and other dtypes, and attention over rows."""
    for layer in params["layers"]:
        h = F.layer_norm(x, (WIDTH,), layer["scale"]) @ layer["a"]
        h = torch.softmax(h @ h.mT, -1) @ h
        x = x + F.dropout(h @ layer["b"], 0.25)
    return x.square().mean()


def arguments(layers: int = 4, rows: int = 12, length: int = 3) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    a, b = draw(layers, WIDTH, 12), draw(layers, 12, WIDTH)
    params = [{"a": a[i], "b": b[i], "scale": draw(WIDTH)} for i in range(layers)]
    return {"layers": params}, draw(rows, length, WIDTH)


def outcome(plan: Any, mesh: Mesh, rows: int = 12, layers: int = 3, **options: Any) -> tuple[Any, Any]:
    params, x = arguments(layers, rows)
    train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, plan, seed=1, **options)
    state, losses = train.init(params), []
    for _ in range(2):
        state, metrics = train(state, x)
        losses.append(metrics.loss)
    return optree.tree_leaves((losses, train.whole(state))), train.program


def both(first: Any, rest: Any, mesh: Mesh, **options: Any) -> tuple[Any, Any]:
    """Compare the plan with partitioned activations to the bits of the plan without. Return both programs."""
    split = fp.partition_activations("tensor", at_least=1)
    (wanted, plain), (found, program) = (
        outcome(fp.chain(*first, *extra, fp.tensor_parallel("tensor", RULES), *rest), mesh, **options)
        for extra in ((), (split,))
    )
    assert all(map(torch.equal, found, wanted))
    return plain, program


@settings(max_examples=2)
@given(
    policy=st.sampled_from(POLICIES),
    ranks=st.sampled_from([2, 3, 4]),
    stage=st.integers(0, 3),
    microbatches=st.sampled_from([1, 2, 3]),
    rows=st.sampled_from([12, 14]),
    narrow=st.booleans(),
)
def test_the_bits_are_those_of_the_plan_without(
    policy: Any, ranks: int, stage: int, microbatches: int, rows: int, narrow: bool
) -> None:
    precision = (fp.mixed_precision("bf16"),) if narrow else ()
    rest = (fp.zero(stage, "data"), fp.accumulate(microbatches))
    plain, program = both((*precision, *policy), rest, Mesh(data=2, tensor=ranks), rows=rows)
    gathers = {key: count for key, count in program.counts().items() if key == ("all_gather", ("tensor",))}
    assert gathers or policy == POLICIES[-1]
    assert program.counts() == {**plain.counts(), **gathers}


@settings(max_examples=1)
@given(
    schedule=st.sampled_from(SCHEDULES),
    policy=st.sampled_from(POLICIES),
    ranks=st.sampled_from([2, 3]),
    stage=st.integers(0, 3),
    rows=st.sampled_from([24, 22]),
)
def test_a_stage_of_a_pipeline_splits_what_it_saves(
    schedule: str, policy: Any, ranks: int, stage: int, rows: int
) -> None:
    rest = (fp.zero(stage, "data"), fp.pipeline("pipe", schedule=schedule, microbatches=4))
    plain, program = both(policy, rest, Mesh(pipe=2, data=2, tensor=ranks), rows=rows, layers=4)
    for before, after in zip(plain.stages, program.stages, strict=True):
        sizes = [sum(info(value).nbytes for value in stage.after_forward) for stage in (before, after)]
        assert sizes[1] <= sizes[0]
    for rank, memory in enumerate(program.memory().ranks):
        assert OneRank(program, rank).peak() == memory.peak


def lowered(*first: Any, ranks: int = 4, rows: int = 64, layers: int = 9) -> Any:
    step = fp.compile(fp.grad(fp.chain(*first, fp.tensor_parallel("tensor", RULES))(blocks)), Mesh(tensor=ranks))
    return step.lower(*arguments(layers, rows))


def blocks(params: Any, x: Tensor) -> Tensor:
    """Megatron's block has two sums in the forward; so has this one."""
    for layer in params["layers"]:
        for _ in range(2):
            x = x + torch.tanh(F.layer_norm(x, (WIDTH,), layer["scale"]) @ layer["a"]) @ layer["b"]
    return x.square().mean()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.every(3)
def test_one_gather_per_block_more(ranks: int) -> None:
    """With checkpoints a block sends 12·b·s·h as published: 6 sums of 2·b·s·h. A gather of b·s·h is 1/12 more.

    The last sum of a block is not needed again, so its recomputation sends 10·b·s·h here. The input of the first block
    is that of the step, which is not saved.
    """
    split = fp.partition_activations("tensor", at_least=1)
    (small, large), (plain, _) = (
        [lowered(fp.remat(), *extra, ranks=ranks, layers=layers) for layers in (4, 5)] for extra in ((split,), ())
    )
    size, axes = 64 * 3 * WIDTH * 8 * (ranks - 1) // ranks, ("tensor",)  # a rank sends this for a gather of b·s·h
    assert large.counts()["all_gather", axes] == small.counts()["all_gather", axes] + 1 == 4
    more = {kind: large.bytes_sent()[kind, axes] - small.bytes_sent()[kind, axes] for kind in ("psum", "all_gather")}
    assert more == {"psum": 10 * size, "all_gather": size}
    assert plain.bytes_sent()["psum", axes] == small.bytes_sent()["psum", axes]


def test_the_peak_falls_by_the_shards() -> None:
    """Of eight saved inputs of layers, seven lie as shards at the peak, where the last one is gathered."""
    split = fp.partition_activations("tensor", at_least=1)
    plain, program = lowered(fp.remat()), lowered(fp.remat(), split)
    assert measured(program) == program.memory().peak
    assert plain.memory().peak - program.memory().peak == 7 * 64 * 3 * WIDTH * 8 * 3 // 4
    assert "partition_activations('tensor'): 8 saved activations of 72.0 KiB are split" in program.notes[0]


def test_cheap_values_are_not_gathered() -> None:
    """The result of a norm follows from its operand, which is gathered: two gathers per block, not four."""
    program = lowered(fp.partition_activations("tensor", at_least=1), layers=2)
    assert program.counts()["all_gather", ("tensor",)] == 4  # after each half of a block, and none for the input
    assert measured(program) == program.memory().peak < lowered(layers=2).memory().peak


def test_small_values_are_left_alone() -> None:
    program, plain = lowered(fp.partition_activations("tensor"), layers=2), lowered(layers=2)
    assert str(program) == str(plain)
    assert program.notes == (
        "partition_activations('tensor'): no saved activation of 64.0 KiB or more is equal on all ranks of 'tensor'",
    )


def test_values_that_differ_along_the_axis_are_left_alone() -> None:
    params, x = arguments(2)
    plan = fp.chain(fp.partition_activations("data", at_least=1), fp.data_parallel("data"))
    step = fp.compile(fp.grad(plan(blocks)), Mesh(data=2))
    step(params, x)
    assert ("all_gather", ("data",)) not in step.program.counts()
    assert step.program.notes[0].endswith("of 1 B or more is equal on all ranks of 'data'")


def test_bad_input() -> None:
    params, x = arguments()
    split, plain = fp.partition_activations("tensor"), fp.tensor_parallel("tensor", RULES)
    with pytest.raises(MeshError, match=r"no axis 'tensor', over which partition_activations\('tensor'\) splits"):
        fp.compile(fp.grad(split(blocks)), Mesh(data=2))(params, x)
    staged = fp.chain(fp.partition_activations("pipe"), fp.pipeline("pipe", microbatches=2))
    with pytest.raises(MeshError, match="the ranks of 'pipe' hold different layers of the pipeline"):
        fp.compile(fp.grad(staged(blocks)), Mesh(pipe=2))(params, x)
    with pytest.raises(fp.OrderError, match=r"write chain\(partition_activations\('tensor'\), tensor_parallel"):
        fp.chain(plain, split)
    with pytest.raises(ValueError, match="'much' is no size"):
        fp.partition_activations("tensor", at_least="much")
    with pytest.raises(TypeError, match="one axis of the mesh"):
        fp.partition_activations(("tensor", "data"))  # type: ignore[arg-type]


INNER = (fp.remat(), fp.partition_activations("tensor", memory="host", at_least=1), fp.tensor_parallel("tensor", RULES))
ON_PROCESSES = [
    (fp.chain(*INNER, fp.zero(2, "data")), Mesh(data=1, tensor=2)),
    (fp.chain(*INNER, fp.pipeline("pipe", microbatches=2)), Mesh(pipe=2, tensor=2)),
]


def _on_rank(rank: int, case: int) -> Any:
    return outcome(*ON_PROCESSES[case], reduction="ordered")[0]


@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_processes(case: int) -> None:
    plan, mesh = ON_PROCESSES[case]
    wanted, _ = outcome(plan, mesh, reduction="ordered")
    for found in run_on_processes(_on_rank, mesh.size, case):
        assert all(map(torch.equal, found, wanted))
