"""Shards over one axis, replicas over another (HSDP): what replicas sum is a shard, and all of it travels at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from ..some_cases import one_in
from .networks import SPLIT, batch, integer_loss, loss, parameters
from .test_zero import data, network
from .test_zero import loss as loss_of_any_size

MESHES = [Mesh(replica=2, shard=2), Mesh(shard=2, replica=2), Mesh(replica=2, shard=4), Mesh(shard=2, replica=4)]
TENSOR = fp.tensor_parallel("tensor", SPLIT)


def hybrid(stage: int, *, inside: bool = True, layout: str = "dims") -> Any:
    zero, replicas = fp.zero(stage, "shard", layout=layout), fp.data_parallel("replica")
    return fp.chain(zero, replicas) if inside else fp.chain(replicas, zero)


def lowered(plan: Any, mesh: Mesh, f: Any = loss, **options: Any) -> Any:
    train = fp.train_step(f, fp.optim.sgd(0.1), mesh, plan, **options)
    return train.lower(train.init(parameters(3)), *batch(8))


def of_gradients(program: Any, kind: str, axis: str) -> list[Any]:
    """Collectives of more than a loss's sum and count, or a norm."""
    return [one for one in program.collectives() if (one.kind, one.axes) == (kind, (axis,)) and one.operand.numel > 2]


@settings(max_examples=7)
@given(
    mesh=st.sampled_from(MESHES),
    stage=st.integers(0, 3),
    inside=st.booleans(),
    tensor=st.booleans(),
    microbatches=st.integers(1, 2),
    bucket=st.sampled_from([None, 300, "auto"]),
)
def test_the_function_itself(
    mesh: Mesh, stage: int, inside: bool, tensor: bool, microbatches: int, bucket: Any
) -> None:
    """In integers the order of sums does not show, whatever mesh, chain and bucket."""
    mesh = Mesh({**mesh.shape, "tensor": 2}) if tensor else mesh
    plan = fp.chain(*([TENSOR] if tensor else []), hybrid(stage, inside=inside), fp.accumulate(microbatches))
    params, inputs = parameters(2, integers=True), batch(16, integers=True)
    step = fp.compile(fp.grad_and_value(plan(integer_loss)), mesh, bucket=bucket)
    wanted = torch.func.grad_and_value(integer_loss)(params, *inputs)
    for a, b in zip(optree.tree_leaves(step(params, *inputs)), optree.tree_leaves(wanted), strict=True):
        assert torch.equal(a, b)


@one_in(4, stage=[1, 2, 3], tensor=[False, True], inside=[True, False], bucket=[None, "auto"])
def test_bytes_by_the_formula(stage: int, tensor: bool, inside: bool, bucket: Any) -> None:
    """Over shards (s−1)/s of the gradients, Ψ; over replicas 2 (r−1)/r of a shard, Ψ/s (FSDP's HSDP)."""
    replicas, shards = 2, 4
    mesh = Mesh(replica=replicas, shard=shards, tensor=2)
    plan = fp.chain(*([TENSOR] if tensor else []), hybrid(stage, inside=inside))
    program = lowered(plan, mesh, bucket=bucket)
    elements = sum(leaf.numel() for leaf in optree.tree_leaves(parameters(3)))
    head = parameters(3)["head"].numel()
    held = 8 * ((elements - head) // (2 if tensor else 1) + head)  # the head is not split over tensor
    assert sum(one.bytes for one in of_gradients(program, "psum_scatter", "shard")) == held * (shards - 1) // shards
    assert (
        sum(one.bytes for one in of_gradients(program, "psum", "replica"))
        == 2 * (held // shards) * (replicas - 1) // replicas
    )
    assert not of_gradients(program, "psum", "shard")


@pytest.mark.parametrize("layout", ["dims", "flat"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_both_sums_travel_in_one_bucket(stage: int, layout: str) -> None:
    """The vector that the reduce-scatter left is what replicas sum: nothing is packed twice."""
    if stage == 3 and layout == "flat":
        return
    program = lowered(hybrid(stage, layout=layout), Mesh(replica=2, shard=2))
    scatters, sums = of_gradients(program, "psum_scatter", "shard"), of_gradients(program, "psum", "replica")
    assert len(scatters) == len(sums) == 1
    assert sums[0].node.args[0] is scatters[0].node
    assert sums[0].operand.numel == scatters[0].operand.numel // 2


def test_several_buckets() -> None:
    program = lowered(hybrid(2), Mesh(replica=2, shard=2), bucket=2000)
    scatters, sums = of_gradients(program, "psum_scatter", "shard"), of_gradients(program, "psum", "replica")
    assert len(scatters) == len(sums) > 2
    order = [node for node in program.traced.nodes if node in {one.node for one in (*scatters, *sums)}]
    assert all(b.args[0] is a for a, b in list(pairwise(order))[::2])


def sequence_loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Two gains where the sequence is split, around a matrix that is split itself."""
    x = fp.constrain(x * 1, P(None, "tensor")) * params["first"]
    x = fp.constrain((x @ params["a"]).relu() @ params["b"], P(None, "tensor")) * params["second"]
    return x.square().sum()


def test_what_only_some_gradients_need() -> None:
    """One sum over `data` for all gradients, and one more for the part of it that ranks of `tensor` sum too."""
    width, inner = 4, 6
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (width,), "a": (width, inner), "b": (inner, width), "second": (width,)}
    params = {name: torch.randint(-2, 3, shape, generator=generator).double() for name, shape in shapes.items()}
    x = torch.randint(-2, 3, (4, 2, width), generator=generator).double()
    tensor = fp.tensor_parallel("tensor", {"a": P(None, "tensor"), "b": P("tensor"), "*": P()})
    plan = fp.chain(tensor, fp.data_parallel("data"))
    step = fp.compile(fp.grad(plan(sequence_loss)), Mesh(data=2, tensor=2), bucket="auto")
    found, wanted = step(params, x), torch.func.grad(sequence_loss)(params, x)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert [one.operand.numel for one in step.program.collectives() if one.axes == ("data",)] == [
        2 * width + width * inner
    ]
    assert [
        one.operand.numel for one in step.program.collectives() if one.kind == "psum" and one.axes == ("tensor",)
    ] == [2 * width]


@one_in(3, sizes=[[8, 16, 4], [7, 9, 5], [17, 33, 3]], inside=[True, False], layout=["dims", "flat"])
def test_all_stages_give_the_same_bits(sizes: list[int], inside: bool, layout: str) -> None:
    """Law 3 on two axes: sums go from the mesh's innermost axis outwards, here shards first, at stage 0 too."""
    mesh = Mesh(replica=2, shard=2)
    for clip in (None, 0.5) if inside and layout == "dims" else (None,):  # a norm has the blocks of the innermost axis
        reference = steps(hybrid(0, inside=inside), mesh, sizes, clip)
        for stage in (1, 2, 3) if layout == "dims" else (1, 2):
            found = steps(hybrid(stage, inside=inside, layout=layout), mesh, sizes, clip)
            assert all(torch.equal(a, b) for a, b in zip(reference, found, strict=True)), f"stage {stage}, {clip}"


def steps(plan: Any, mesh: Mesh, sizes: list[int], clip: float | None, count: int = 5) -> list[torch.Tensor]:
    """Parameters after some steps, and the loss; flat and other states hold the same in other trees."""
    train = fp.train_step(loss_of_any_size, fp.optim.adamw(1e-2), mesh, plan, clip=clip)
    state = train.init(network(sizes))
    for _ in range(count):
        state, metrics = train(state, *data(sizes, 8))
    return [*optree.tree_leaves(train.params(state)), metrics.loss]


@one_in(3, mesh=MESHES[:2], stage=[1, 2, 3], inside=[True, False])
def test_clipping(mesh: Mesh, stage: int, inside: bool) -> None:
    """Within rounding, whichever axis is the inner one and whichever transform."""
    wanted = steps(None, Mesh(), [7, 9, 5], 0.5, 3)
    for a, b in zip(steps(hybrid(stage, inside=inside), mesh, [7, 9, 5], 0.5, 3), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_switched_off() -> None:
    """Without the pass replicas sum whole gradients."""
    mesh = Mesh(replica=2, shard=4)
    program = lowered(hybrid(3), mesh, without=("shards first",))
    with_it = lowered(hybrid(3), mesh)
    sent, less = program.bytes_sent()[("psum", ("replica",))], with_it.bytes_sent()[("psum", ("replica",))]
    loss_bytes = 8 * 2
    assert sent - loss_bytes == 4 * (less - loss_bytes)
    assert "shards first" in with_it.passes and "shards first" not in program.passes


def test_sums_in_a_narrow_type() -> None:
    """The order of sums is chosen before their types are, so both travel narrow."""
    plan = fp.chain(fp.mixed_precision("bf16", reduce="bf16"), hybrid(3))
    program = lowered(plan, Mesh(replica=2, shard=2))
    found = of_gradients(program, "psum_scatter", "shard") + of_gradients(program, "psum", "replica")
    assert {one.operand.dtype for one in found} == {torch.bfloat16}
    assert len(found) == 2


def train_on(rank: int, mesh: Mesh) -> list[torch.Tensor]:
    """States of ZeRO-2 and of ZeRO-3 after two steps."""
    found = []
    for stage in (2, 3):
        train = fp.train_step(loss_of_any_size, fp.optim.adamw(1e-2), mesh, hybrid(stage), reduction="ordered")
        state = train.init(network([7, 9, 5]))
        for _ in range(2):
            state, _ = train(state, *data([7, 9, 5], 8))
        found += optree.tree_leaves(train.whole(state))
    return found


def test_processes() -> None:
    mesh = Mesh(replica=2, shard=2)
    simulated = train_on(0, mesh)
    for found in run_on_processes(train_on, 4, mesh):
        assert all(torch.equal(a, b) for a, b in zip(simulated, found, strict=True))
