"""Data parallelism with a master: laws against the plain function and against DDP, and what a master refuses."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.errors import OrderError, PartitionError, PipelineError, TypingError
from functional_parallel.ir import info, primitive_name
from functional_parallel.runtime.execution.codegen import Writer
from functional_parallel.testing.tracker import tracked
from sharding_specs import Mesh, P, shard, unshard

from ..laws.random_functions import Program, arguments, programs
from ..processes import run_on_processes
from . import work

SEEDS = st.integers(0, 1000)


@st.composite
def masters(draw: st.DrawFn, most: int = 4) -> tuple[Mesh, Any]:
    ranks = draw(st.integers(1, most))
    return Mesh(data=ranks), fp.data_parallel("data", master=draw(st.integers(0, ranks - 1)))


def same(found: Any, wanted: Any) -> bool:
    leaves = (
        [torch.as_tensor(leaf) for leaf in optree.tree_leaves(each)] for each in (found, wanted)
    )  # 0 in `by_path`
    return all(map(torch.equal, *leaves))


# -----------------------------------------------------------------------------
# Laws
# -----------------------------------------------------------------------------


@settings(max_examples=14, deadline=None)
@given(programs(), masters(), st.integers(4, 9), st.sampled_from([2, 3, 4, 8]), SEEDS, st.integers(-1, 6))
def test_it_equals_the_plain_function(f: Program, drawn: Any, rows: int, inner: int, seed: int, at: int) -> None:
    """Any function, ranks, master and batch, also one that the ranks do not divide, with the mark anywhere."""
    mesh, plan = drawn
    args = arguments(seed, rows=rows, inner=inner)
    model = f if at < 0 else work.Marked(f, at)
    assert same(fp.compile(fp.grad_and_value(plan(model)), mesh)(*args), fp.grad_and_value(f)(*args))


@settings(max_examples=4, deadline=None)
@given(programs(3), masters(2), SEEDS, st.integers(-1, 3))
def test_outside_of_tensor_parallelism(f: Program, drawn: Any, seed: int, at: int) -> None:
    mesh, master = drawn
    args = arguments(seed)
    plan = fp.chain(fp.tensor_parallel("tensor", {"w0": P(None, "tensor"), "w1": P("tensor")}), master)
    found = fp.compile(fp.grad_and_value(plan(f if at < 0 else work.Marked(f, at))), Mesh({**mesh.shape, "tensor": 2}))
    assert same(found(*args), fp.grad_and_value(f)(*args))


@settings(max_examples=4, deadline=None)
@given(programs(3), masters(3), st.integers(6, 9), st.integers(1, 3), SEEDS)
def test_inside_of_accumulation(f: Program, drawn: Any, rows: int, microbatches: int, seed: int) -> None:
    mesh, master = drawn
    args = arguments(seed, rows=rows * mesh.size * microbatches)
    plan = fp.chain(master, fp.accumulate(microbatches))
    assert same(fp.compile(fp.grad_and_value(plan(f)), mesh)(*args), fp.grad_and_value(f)(*args))


def test_a_batch_that_is_split_inside_of_another_axis() -> None:
    """Each of two blocks of three samples is split over the ranks."""
    args = arguments(0, rows=6)
    f = Program((("product", 0, 0), ("relu", 1, 1)))
    plan = fp.data_parallel("data", master=0, batch=P(("replica", "data")))
    step = fp.compile(fp.grad_and_value(plan(f)), Mesh(replica=2, data=2))
    assert same(step(*args), fp.grad_and_value(f)(*args))


@settings(max_examples=6, deadline=None)
@given(masters(), st.integers(1, 4), st.integers(1, 9), SEEDS)
def test_padded_batches_have_the_mean_of_their_real_samples(drawn: Any, rows: int, real: int, seed: int) -> None:
    """A loss with a mask, whose mean is a quotient of two sums: the master adds both and divides."""
    mesh, plan = drawn
    real = min(real, rows * mesh.size)
    params, x = arguments(seed, rows=real, inner=4)

    def masked(params: dict[str, torch.Tensor], x: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        return ((x @ params["w0"]).sum(1) * present).sum() / present.sum()

    found = fp.compile(fp.grad_and_value(plan(masked)), mesh)(params, *fp.pad_batch(x, rows * mesh.size))
    wanted = fp.grad_and_value(masked)(params, x, torch.ones(real))
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@settings(max_examples=5, deadline=None)
@given(
    masters(),
    st.integers(1, 3),
    st.sampled_from(sorted(work.OPTIMIZERS)),
    st.sampled_from([None, 0.3]),
)
def test_training_equals_ddp_to_the_bit(drawn: Any, rows: int, optimizer: str, clip: float | None) -> None:
    mesh, plan = drawn
    runs = (
        work.trained(work.loss, optimizer, each, mesh, rows * mesh.size, clip=clip)
        for each in (plan, fp.data_parallel("data"))
    )
    assert same(*runs)


@settings(max_examples=5, deadline=None)
@given(
    masters(),
    st.integers(4, 9),
    st.sampled_from(sorted(work.OPTIMIZERS)),
    st.booleans(),
)
def test_training_equals_one_device(drawn: Any, rows: int, optimizer: str, marked: bool) -> None:
    mesh, plan = drawn
    f = work.marked_loss if marked else work.loss
    found, wanted = (
        optree.tree_leaves(work.trained(f, optimizer, each, on, rows))
        for each, on in ((plan, mesh), (None, Mesh(data=1)))
    )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks, master", [(2, 0), (3, 1)])
def test_processes_equal_simulated_ranks_to_the_bit(ranks: int, master: int) -> None:
    wanted = work.on_processes(0, ranks, master)
    for found in run_on_processes(work.on_processes, ranks, ranks, master):
        assert same(found, wanted)


def test_a_run_on_processes() -> None:
    """Predict, copy, read, load, replay, and stop at a loss that is not finite: as on simulated ranks."""
    wanted, told, _ = work.around_a_step(0, 2, 1)
    assert told[1] is not None
    for rank, (found, said, held) in enumerate(run_on_processes(work.around_a_step, 2, 2, 1)):
        assert same(found, wanted) and said == told
        assert set(held) == {rank != 1}  # the state is on the master


def test_mixed_precision_keeps_masters_and_loss_scale_on_the_master() -> None:
    scaled = fp.mixed_precision("fp16", loss_scale=fp.LossScale(initial=4.0))
    runs = (
        work.trained(work.loss, "adamw", fp.chain(scaled, each), Mesh(data=2), 4)
        for each in (fp.data_parallel("data", master=1), fp.data_parallel("data"))
    )
    assert same(*runs)


@pytest.mark.parametrize("outer", [None, fp.optim.sgd(0.7, momentum=0.9)])
def test_each_replica_may_have_a_master(outer: fp.optim.Optimizer | None) -> None:
    replicas = fp.local_sgd("hosts", inner=3) if outer is None else fp.diloco("hosts", inner=3, outer=outer)
    runs = (
        optree.tree_leaves(work.trained(work.loss, "adamw", fp.chain(each, replicas), Mesh(hosts=2, data=2), 8))
        for each in (fp.data_parallel("data", master=1), fp.data_parallel("data"))
    )
    assert same(*runs)


def test_a_state_moves_between_plans() -> None:
    """What a master saved, ZeRO-3 loads, and the other way round."""
    mesh = Mesh(data=2)
    plans = fp.data_parallel("data", master=0), fp.zero(3, "data")
    for first, second in (plans, plans[::-1]):
        a, b = (fp.train_step(work.loss, fp.optim.adamw(1e-2), mesh, plan) for plan in (first, second))
        state, _ = a(a.init(work.parameters()), *work.batch(4))
        saved = a.whole(state)
        assert same(b.whole(b.load(*saved, state.step)), saved)


# -----------------------------------------------------------------------------
# The program
# -----------------------------------------------------------------------------


def exchanges(program: Any) -> list[tuple[str, str]]:
    return list(dict.fromkeys((one.kind, one.phase) for one in program.collectives()))


@pytest.mark.parametrize("f", [work.loss, work.marked_loss])
def test_a_step_has_the_five_exchanges(f: Any) -> None:
    train = fp.train_step(f, fp.optim.adamw(1e-2), Mesh(data=2), fp.data_parallel("data", master=0))
    program = train.lower(work.parameters(), *work.batch(4))
    assert exchanges(program) == [
        ("scatter", "forward"),
        ("broadcast", "forward"),
        ("gather", "forward"),
        ("scatter", "backward"),
        ("reduce", "backward"),
    ]
    counts = program.counts()
    assert counts["broadcast", ("data",)] == counts["reduce", ("data",)] == 3  # one per parameter
    is_marked = f is work.marked_loss  # then the labels stay on the master, and the gradient of 4 × 3 outputs is sent
    sent = {one.phase: one.operand.shape for one in program.collectives() if one.kind == "scatter"}
    assert counts["scatter", ("data",)] == (2 if is_marked else 3)
    assert sent["backward"] == ((4, 3) if is_marked else (2,))


def test_the_master_runs_out_of_memory_first() -> None:
    """It holds parameters, their gradients and the optimizer's state; the others a copy of the parameters in a step."""
    train = fp.train_step(work.loss, fp.optim.adamw(1e-2), Mesh(data=3), fp.data_parallel("data", master=1))
    params = work.parameters(width=64)
    program = train.lower(params, *work.batch(6, width=64))
    held = sum(8 * leaf.numel() for leaf in params.values())
    peaks = [program.memory(rank).peak for rank in range(3)]
    assert program.memory().peak == peaks[1] == max(peaks)
    assert program.memory(1).alive["parameters"] == held and program.memory(1).alive["optimizer state"] >= 2 * held
    for rank in (0, 2):
        alive = program.memory(rank).alive
        assert alive["parameters"] == alive["optimizer state"] == 0
    assert peaks[0] == peaks[2] and peaks[1] > peaks[0] + 3 * held
    with pytest.raises(ValueError, match="ranks 0 … 2, not 3"):
        program.memory(3)


def test_an_estimate_names_the_master() -> None:
    found = fp.estimate(work.parameters(), Mesh(data=3), fp.data_parallel("data", master=1))
    assert "rank 1 of 'data', the master" in str(found)
    assert found.total == fp.estimate(work.parameters(), Mesh(data=3), fp.data_parallel("data")).total


def test_only_the_master_holds_the_state() -> None:
    spec = P("tensor", owner={"data": 1})
    mesh = Mesh(data=2, tensor=2)
    parts = [shard(torch.arange(4.0), spec, mesh, rank) for rank in mesh.ranks]
    assert [part.is_meta for part in parts] == [True, True, False, False]
    assert torch.equal(unshard(parts, spec, mesh), torch.arange(4.0))
    assert repr(spec) == "P('tensor', owner={'data': 1})" and spec.without({"data"}) == P("tensor")


# -----------------------------------------------------------------------------
# What is refused
# -----------------------------------------------------------------------------

MASTER = fp.data_parallel("data", master=0)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "inside of ZeRO": (lambda: fp.chain(MASTER, fp.zero(1, "b"))(work.loss), ValueError, "holds all training state"),
    "outside of ZeRO": (lambda: fp.chain(fp.zero(3, "b"), MASTER)(work.loss), ValueError, "has one data axis"),
    "of ZeRO": (lambda: fp.zero(1, "data", master=0), TypeError, "no argument master: fp.data_parallel"),
    "inside of DDP": (lambda: fp.chain(MASTER, fp.data_parallel("b"))(work.loss), ValueError, "leave master= out"),
    "two masters": (
        lambda: fp.chain(MASTER, fp.data_parallel("b", master=0))(work.loss),
        ValueError,
        "has one data axis",
    ),
    "one axis twice": (lambda: fp.chain(MASTER, fp.zero(3, "data")), OrderError, "both take the axis"),
    "in a pipeline": (
        lambda: fp.chain(MASTER, fp.pipeline("pipe", microbatches=2))(work.loss),
        PipelineError,
        "of their own stages",
    ),
    "not a rank": (lambda: fp.data_parallel("data", master=True), ValueError, "index of a rank"),
    "a negative rank": (lambda: fp.data_parallel("data", master=-1), ValueError, "0 or more"),
    "a missing rank": (
        lambda: fp.compile(fp.data_parallel("data", master=2)(work.loss), Mesh(data=2))(
            work.parameters(), *work.batch(4)
        ),
        ValueError,
        "'data' has 2 ranks, 0 … 1",
    ),
    "too small a batch": (
        lambda: fp.compile(MASTER(work.loss), Mesh(data=4))(work.parameters(), *work.batch(3)),
        PartitionError,
        "1: 3, 2: 3 samples over the 4 ranks",
    ),
    "a batch of each rank": (
        lambda: fp.train_step(work.loss, fp.optim.sgd(0.1), Mesh(data=2), MASTER, batch="own"),
        ValueError,
        "which scatters the batch itself",
    ),
    "compiled regions": (
        lambda: fp.compile(MASTER(work.loss), Mesh(data=2), backend="inductor").lower(
            work.parameters(), *work.batch(4)
        ),
        ValueError,
        "backend='eager'",
    ),
    "by hand": (
        lambda: fp.shard_map(lambda w, x: w * x, Mesh(data=2), (P(owner={"data": 0}), P("data")), P("data"))(
            torch.ones(2), torch.ones(4)
        ),
        TypingError,
        r"holds \(Owned\) meets one that is Varying",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case: str) -> None:
    call, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        call()


def test_an_op_that_casts_its_operands_itself() -> None:
    """Weights of classes stay on the master until the loss of each rank reads them."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = params["bias"].detach().square()
        return torch.nn.functional.cross_entropy(x @ params["w"], y, weight=weight, ignore_index=1)

    args = work.parameters(), work.batch(6)[0], torch.arange(6) % 3
    found = fp.compile(fp.grad_and_value(fp.data_parallel("data", master=1)(loss)), Mesh(data=2))(*args)
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(fp.grad_and_value(loss)(*args)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# -----------------------------------------------------------------------------
# Memory, measured
# -----------------------------------------------------------------------------


def measured(program: Any, rank: int) -> int:
    """The peak of live storages of a rank's flat function; collectives stand in as allocations of their results."""
    absent = program.absent(rank)

    def line(node: torch.fx.Node, writer: Writer) -> str:
        if node in absent:
            return "None"
        if primitive_name(node) is not None:
            aval = info(node).aval
            return f"{writer.constant(partial(torch.zeros, aval.shape, dtype=aval.dtype))}()"
        if node.target is operator.getitem:
            return f"{writer.names[node.args[0]]}[{node.args[1]}]"
        return writer.call(node, lambda value: writer.names[value])

    run = Writer(program.traced, line).function()
    inputs = [
        None if node in absent else torch.ones(info(node).aval.shape, dtype=info(node).aval.dtype)
        for node in program.traced.inputs
    ]
    with torch.no_grad(), tracked((inputs, list(program.traced.constants.values()))) as tracker:
        run(list(inputs))
    return tracker.peak


@pytest.mark.parametrize("f", [work.loss, work.marked_loss])
@pytest.mark.parametrize("rows", [6, 7])
def test_the_predicted_peak_of_each_rank_is_the_measured_one(f: Any, rows: int) -> None:
    train = fp.train_step(f, fp.optim.adamw(1e-2), Mesh(data=3), fp.data_parallel("data", master=1), clip=1.0)
    program = train.lower(work.parameters(width=16), *work.batch(rows, width=16))
    assert [measured(program, rank) for rank in range(3)] == [program.memory(rank).peak for rank in range(3)]


# -----------------------------------------------------------------------------
# The mark under other plans
# -----------------------------------------------------------------------------

PLANS: dict[str, Any] = {
    "no plan": None,
    "DDP": fp.data_parallel("data"),
    "ZeRO-2": fp.zero(2, "data"),
    "ZeRO-3": fp.chain(fp.remat(), fp.zero(3, "data")),
    "tensor": fp.chain(fp.tensor_parallel("tensor", {"w": P(None, "tensor")}), fp.zero(1, "data")),
    "accumulate": fp.chain(fp.data_parallel("data"), fp.accumulate(2)),
    "pipeline": fp.pipeline("pipe", microbatches=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_mark_has_no_effect_under_another_plan(name: str) -> None:
    def model(params: dict[str, torch.Tensor], x: torch.Tensor, mark: Any) -> torch.Tensor:
        hidden = torch.tanh(x @ params["w"] + params["bias"])
        hidden = fp.stage_boundary(hidden)
        return mark(hidden @ params["v"]).square().mean()

    mesh = Mesh({axis: 2 for axis in ("data", "tensor", "pipe") if axis in repr(PLANS[name]) or axis == "data"})
    trained = []
    for mark in (fp.outputs, lambda x: x):
        train = fp.train_step(partial(model, mark=mark), fp.optim.adamw(1e-2), mesh, PLANS[name])
        state, metrics = train(train.init(work.parameters()), work.batch(8)[0])
        trained.append((train.program.counts(), (train.whole(state), metrics.loss)))
    (counts, found), (wanted_counts, wanted) = trained
    assert counts == wanted_counts and same(found, wanted)
