"""Activations on the host between forward and backward: the bits of the plan without, exact bytes and peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import functional_parallel as fp
from functional_parallel.ir import first_operand, info
from functional_parallel.pipelines import PipelineProgram
from sharding_specs import Mesh

from ..laws.test_offload import measured as measured_peaks
from ..laws.test_offload import predicted
from ..lowering import test_for_cuda as cuda
from ..program.test_memory import measured
from .test_partition_activations import POLICIES, RULES, SCHEDULES, WIDTH, arguments, blocks, outcome

TENSOR = fp.tensor_parallel("tensor", RULES)
STAGED = [(fp.pipeline("pipe", schedule=schedule, microbatches=4),) for schedule in SCHEDULES[1:]]
SIZE = 256 * 3 * WIDTH * 8  # bytes of the activations between the layers of `blocks`


@settings(max_examples=2)
@given(
    policy=st.sampled_from(POLICIES),
    stage=st.integers(0, 3),
    outer=st.sampled_from([(), (fp.accumulate(3),), *STAGED]),
    split=st.sampled_from([None, "device", "host"]),
    fraction=st.sampled_from([None, 0.4, 1.0]),
    narrow=st.booleans(),
)
def test_the_bits_are_those_of_the_plan_without(
    policy: Any, stage: int, outer: Any, split: Any, fraction: Any, narrow: bool
) -> None:
    """Activations that are split, moved, or split and then moved. What is sent is that of the split alone.

    On every rank, the peak of each memory is what a tracker of the run measures.
    """
    first = (fp.mixed_precision("bf16"),) * narrow + policy
    moves = () if fraction is None else (fp.offload(activations="host", fraction=fraction, at_least=1),)
    mesh, layers = Mesh(data=2, tensor=2), 3
    if outer and isinstance(outer[0], fp.pipeline):
        mesh, layers = Mesh(pipe=2, data=2, tensor=2), 4

    def run(memory: str | None, moves: Any) -> Any:
        parts = () if memory is None else (fp.partition_activations("tensor", memory=memory, at_least=1),)
        plan = fp.chain(*first, *parts, TENSOR, fp.zero(stage, "data"), *moves, *outer)
        return outcome(plan, mesh, rows=24, layers=layers)

    (wanted, plain), (found, program) = run(split and "device", ()), run(split, moves)
    assert all(map(torch.equal, found, wanted))
    assert program.counts() == plain.counts()
    sent, before = program.bytes_sent(), plain.bytes_sent()
    if "zb-h1" in repr(outer):  # the backward of inputs may need the weight of a norm too, in one of its gathers
        assert sent.pop(("all_gather", ("data",)), 0) >= before.pop(("all_gather", ("data",)), 0)
    assert sent == before
    assert measured_peaks(program) == predicted(program)
    moved = program.bytes_moved()
    assert bool(moved) == ("host" in program.memory().peaks)
    if "zb-h1" not in repr(outer):  # there a value may be fetched for the gradients of weights too
        assert moved.get(("device", "host")) == moved.get(("host", "device"))
    if fraction == 1 or split == "host":  # a share of one value is none
        assert moved or policy == (fp.remat("nothing"),)


def lowered(*first: Any, outer: Any = (), mesh: Mesh | None = None) -> Any:
    step = fp.compile(fp.grad(fp.chain(*first, TENSOR, *outer)(blocks)), mesh or Mesh(tensor=4))
    return step.lower(*arguments(9 if mesh is None else 4, 256))


@pytest.mark.parametrize("split", [False, True])
def test_bytes_and_peaks(split: bool) -> None:
    """Of eight saved inputs of layers, one is on the device at a time.

    The peak was where the backward begins. Now it is where it ends, with the gradients of seven more layers.
    """
    moves = (fp.offload(activations="host", at_least=1),) if not split else ()
    parts = (fp.partition_activations("tensor", memory="host", at_least=1),) if split else ()
    plain, program = lowered(fp.remat()), lowered(fp.remat(), *parts, outer=moves)
    part = SIZE // 4 if split else SIZE
    assert program.bytes_moved() == {("device", "host"): 8 * part, ("host", "device"): 8 * part}
    used = program.memory()
    gradients = (2 * WIDTH * 12 // 4 + WIDTH) * 8  # of a layer
    assert plain.memory().peak - used.peak == 7 * (SIZE - gradients)
    assert used.peaks["host"] == 8 * part
    assert measured(program) == max(map(sum, zip(used.curve, used.beside["host"].curve, strict=True)))
    assert program.counts().get(("all_gather", ("tensor",)), 0) == (8 if split else 0)


def test_a_share_is_that_of_the_first_values() -> None:
    """They wait longest. The share counts bytes, and no value is cut."""
    program = lowered(fp.remat(), outer=(fp.offload(activations="host", fraction=0.55, at_least=1),))
    assert program.bytes_moved() == {("device", "host"): 4 * SIZE, ("host", "device"): 4 * SIZE}
    assert program.notes == ("offload(activations='host'): 4 saved activations of 144.0 KiB are moved",)
    position = {node: number for number, node in enumerate(program.traced.nodes)}
    moves = [one.node for one in program.moves()]
    down, up = moves[:4], moves[4:]
    assert [position[first_operand(node)] for node in up] == [position[node] for node in reversed(down)]
    assert all(info(node).backward for node in up) and not any(info(node).backward for node in down)


def test_small_values_stay() -> None:
    large = fp.offload(activations="host", at_least="1MiB")
    program, plain = lowered(outer=(large,)), lowered()
    assert str(program) == str(plain) and not program.bytes_moved()
    assert program.notes == ("offload(activations='host'): there is no saved activation of 1.0 MiB or more to move",)


def test_each_rank_of_a_pipeline_holds_those_of_its_microbatches() -> None:
    moves, mesh = fp.offload(activations="host", at_least=1), Mesh(pipe=2, tensor=2)
    seen = {}
    for schedule in ("gpipe", "1f1b"):
        outer = (moves, fp.pipeline("pipe", schedule=schedule, microbatches=4))
        program = lowered(fp.remat(), outer=outer, mesh=mesh)
        assert isinstance(program, PipelineProgram)
        seen[schedule] = [rank.peaks["host"] for rank in program.memory().ranks]
    each = SIZE // 4  # of a microbatch; the first stage saves one input of a layer, the other two and its result
    assert seen == {"gpipe": [4 * each, 12 * each], "1f1b": [2 * each, 3 * each]}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.every(2)
def test_with_state_and_parameters_on_the_host(stage: int) -> None:
    whole = fp.offload(state="host", parameters="host", activations="host", at_least=1)
    (wanted, _), (found, program) = (
        outcome(fp.chain(TENSOR, fp.zero(stage, "data"), *moves), Mesh(data=2, tensor=2)) for moves in ((), (whole,))
    )
    assert all(map(torch.equal, found, wanted)) and measured_peaks(program) == predicted(program)
    assert {one.phase for one in program.moves()} == {"forward", "backward", "update"}


def test_values_that_the_model_moved_stay() -> None:
    """What is computed on the host is saved there."""

    def loss(w: Tensor, x: Tensor) -> Tensor:
        x = fp.to_memory(torch.tanh(x @ w), "host")
        x = fp.to_memory(torch.sin(torch.exp(x)), "device")
        return (F.silu(x) @ w).sum()

    w, x = torch.eye(4).double(), torch.randn(8, 4).double()
    wanted = torch.func.grad(lambda w, x: (F.silu(torch.sin(torch.exp(torch.tanh(x @ w)))) @ w).sum())(w, x)
    step = fp.compile(fp.grad(fp.offload(activations="host", at_least=1)(loss)), Mesh())
    torch.testing.assert_close(step(w, x), wanted)
    hosted = [one for one in step.program.moves() if one.source == one.target]
    assert not hosted


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.every(2)
def test_programs_for_cuda(staged: bool) -> None:
    """Lowered without a device: a value leaves it for main memory, and comes back to it."""
    inner = (fp.remat(), fp.partition_activations("tensor", memory="host", at_least=1))
    outer = (fp.pipeline("pipe", microbatches=2),) * staged
    moves = fp.offload(activations="host", at_least=1)
    plan = fp.chain(*inner, fp.tensor_parallel("tensor", cuda.SPECS), fp.zero(1, "data"), moves, *outer)
    mesh = Mesh(pipe=2, data=2, tensor=2) if staged else Mesh(data=2, tensor=2)
    program = cuda.lower_step(cuda.loss, mesh, plan, cuda.ADAMW, {})
    found = {(one.source, str(one.operand.device), one.node.kwargs["device"].type) for one in program.moves()}
    assert found == {("device", "cpu", "cpu"), ("host", "cuda:0", "cuda")}


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"offload\(activations='disc'\): the memories are 'device', 'host'"):
        fp.offload(activations="disc")
    with pytest.raises(ValueError, match="moves nothing: pass state=, gradients=, parameters= or activations='host'"):
        fp.offload()
    with pytest.raises(ValueError, match=r"partition_activations\(memory='disc'\): the memories are"):
        fp.partition_activations("tensor", memory="disc")
    for fraction in (0, 1.5):
        with pytest.raises(ValueError, match="fraction is the share of the bytes"):
            fp.offload(activations="host", fraction=fraction)
    with pytest.raises(fp.OrderError, match=r"write chain\(zero\(1, 'data'\), offload\("):
        fp.chain(fp.offload(activations="host"), fp.zero(1, "data"))
