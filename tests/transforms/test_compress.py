"""Compressed collectives: with the identity every bit, with a quantiser within the bound; and the bytes sent."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.errors import OrderError
from functional_parallel.ir import info
from sharding_specs import Mesh, P

from ..ops.test_block_quantiser import bound
from ..passes.networks import SPLIT, batch, loss, parameters
from ..processes import run_on_processes

TENSOR = fp.tensor_parallel("tensor", SPLIT)
BF16 = fp.mixed_precision("bf16")
DATA = {  # inner transforms by name, with their axes
    **{f"zero {stage}": [fp.zero(stage, "local")] for stage in range(4)},
    "flat": [fp.zero(1, "local", layout="flat")],
    "small ones": [fp.zero(3, "local", whole_below=40)],
    "nested": [fp.zero(3, "local"), fp.zero(3, "node")],
    "secondary": [fp.zero(3, "local"), fp.zero(3, "node", keep_gathered=True)],
    "hybrid": [fp.zero(3, "local"), fp.data_parallel("node")],
    "both": [fp.zero(1, "local"), fp.zero(2, "node")],
    "replicas": [fp.data_parallel("local"), fp.data_parallel("node")],
}


def compressed(
    inner: list[Any], gather: str | None = "identity", reduce: str | None = "identity", **options: Any
) -> Any:
    return fp.compress([each.axis for each in reversed(inner)], gather=gather, reduce=reduce, **options)


def network(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.square().mean()


def trained(plan: Any, mesh: Mesh, bucket: Any, steps: int = 2, size: int = 16) -> tuple[list[torch.Tensor], Any]:
    train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, plan, bucket=bucket, clip=1.0)
    state = train.init(parameters(2))
    metrics = []
    for _ in range(steps):
        state, found = train(state, *batch(size))
        metrics += [found.loss, found.grad_norm]
    return [*optree.tree_leaves(train.params(state)), *metrics], train.program


CASES = {
    "inner": st.sampled_from(sorted(DATA)),
    "ranks": st.sampled_from([(2, 2), (1, 3), (2, 1), (1, 4)]),
    "before": st.sampled_from(["", "tensor", "tensor, split", "remat", "bf16"]),
    "after": st.sampled_from(["", "accumulate", "each", "pipeline", "offload"]),
    "bucket": st.sampled_from([None, 300, "auto"]),
    "feedback": st.sampled_from([None, 0.5]),
}


def check_identity(
    inner: str, ranks: tuple[int, int], before: str, after: str, bucket: Any, feedback: float | None
) -> None:
    feedback = None if inner == "flat" else feedback
    chosen, sizes = DATA[inner], dict(zip(("node", "local"), ranks, strict=True))
    used = {each.axis: sizes[each.axis] for each in reversed(chosen)}
    after = "" if after == "pipeline" and inner == "flat" else after
    split = [fp.partition_activations("tensor"), TENSOR]
    named = {"tensor": [TENSOR], "tensor, split": split, "remat": [fp.remat()], "bf16": [BF16]}
    pipeline = fp.pipeline("pipe", schedule="1f1b", microbatches=2)
    outer = {
        "offload": [fp.offload(state="host")],
        "accumulate": [fp.accumulate(2)],
        "each": [fp.accumulate(2, reduce="each")],
        "pipeline": [pipeline],
    }
    others = [axis for axis, name in (("tensor", before), ("pipe", after)) if name.startswith(axis)]
    mesh = Mesh({**used, **dict.fromkeys(others, 2)})
    same = compressed(chosen, feedback=feedback)
    rows = [[*named.get(before, []), *chosen, *more, *outer.get(after, [])] for more in ([], [same])]
    (plain, _), (found, program) = (trained(fp.chain(*row), mesh, bucket, size=24) for row in rows)
    assert all(map(torch.equal, plain, found))
    assert any(kind == "all_to_all" for kind, _ in program.counts()) or max(used.values()) == 1


@settings(max_examples=4, deadline=None)
@given(**CASES)
def test_the_identity_keeps_every_bit(**case: Any) -> None:
    check_identity(**case)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(**CASES)
def test_the_identity_keeps_every_bit_of_many_plans(**case: Any) -> None:
    check_identity(**case)


@settings(max_examples=5, deadline=None)
@given(
    ranks=st.integers(2, 4),
    rows=st.integers(1, 5),
    columns=st.integers(1, 40),
    stage=st.sampled_from([0, 3]),
    form=st.sampled_from(["int8", "int4"]),
    block=st.sampled_from([2, 16, 64]),
    seed=st.integers(0, 99),
)
def test_gradients_are_within_the_bound(
    ranks: int, rows: int, columns: int, stage: int, form: str, block: int, seed: int
) -> None:
    """With any bucket, the same bits. The gradient on rank r is its row of the batch."""
    make = torch.Generator().manual_seed(seed)
    params = {name: torch.zeros(rows * ranks, columns, dtype=torch.float64) for name in ("a", "b")}
    scales = {name: torch.randn(ranks, rows * ranks, columns, generator=make, dtype=torch.float64) for name in params}

    def linear(params: Any, scales: Any) -> torch.Tensor:
        return sum((params[name] * scales[name]).sum() for name in params)

    plan = fp.chain(fp.zero(stage, "data"), fp.compress("data", gather=None, reduce=form, block=block))
    found = []
    for bucket in (None, "auto"):
        step = fp.compile(fp.grad(plan(linear)), Mesh(data=ranks), bucket=bucket)
        found.append(step(params, scales))
        assert step.program.counts()["all_to_all", ("data",)] == (2 if bucket is None else 1)
    for name, x in scales.items():
        pieces = x.reshape(ranks, ranks, -1)  # each rank's part for each rank, by the first dim
        allowed = bound(pieces, [rows * columns], f"{form}/{block}").sum(0).view(rows * ranks, columns)
        assert ((found[0][name] - x.sum(0)).abs() <= allowed + 1e-12).all()
        assert torch.equal(found[0][name], found[1][name])


@pytest.mark.parametrize("bucket", [None, "auto"])
def test_the_bytes_between_hosts_are_a_quarter_of_those_of_zero3(bucket: Any) -> None:
    """ZeRO++: each of h sends (h-1)/h · (0.5 + 0 + 0.25) M and 4 bytes a block, where ZeRO-3 sends (h-1)/h · 3 M."""

    hosts, local, width, layers = 2, 2, 32, 3
    params = [torch.randn(width, width) for _ in range(layers)]
    m = 2 * layers * width**2
    precision = fp.mixed_precision("bf16", reduce="bf16")
    plain = fp.chain(precision, fp.zero(3, "local"), fp.zero(3, "node"))
    inner = fp.chain(fp.zero(3, "local"), fp.zero(3, "node", keep_gathered=True))
    fewer = fp.chain(precision, inner, fp.compress(("node", "local"), gather="int8", reduce="int4", block=64))

    def sent(plan: Any) -> tuple[int, Any]:
        train = fp.train_step(network, fp.optim.sgd(0.1), Mesh(node=hosts, local=local), plan, bucket=bucket)
        program = train.lower(train.init(params), torch.randn(8, width))
        found = [one for one in program.collectives() if one.axes == ("node",) and one.parameters]
        return sum(one.bytes for one in found) * local, program

    by_zero, _ = sent(plain)
    kept = m // layers  # the last layer's gathered copy is still there when its backward starts
    assert by_zero == (hosts - 1) / hosts * (3 * m - kept)
    by_compress, program = sent(fewer)
    blocks = m // 2 // 64
    assert by_compress == (hosts - 1) / hosts * (0.75 * m + 2 * 4 * blocks)
    assert program.price().bytes_sent() == program.bytes_sent()
    assert sum(row.bytes for row in program.explain().rows) == sum(program.bytes_sent().values())
    assert any(note.startswith("compressed: ") for note in program.notes)


@settings(max_examples=2, deadline=None)
@given(st.integers(2, 5), st.sampled_from([4, 8]), st.sampled_from([2, 4]), st.sampled_from([None, "auto"]))
def test_secondary_shards_are_gathered_over_the_fast_axis(layers: int, width: int, local: int, bucket: Any) -> None:
    """hpZ: the same bits, no gather over the slow axis in the backward, and the memory of a rank's part."""
    params = [torch.randn(width, width, dtype=torch.float64) for _ in range(layers)]
    x, mesh, found = torch.randn(2 * local, width, dtype=torch.float64), Mesh(node=2, local=local), []
    for keep in (False, True):
        slow, fast = fp.zero(3, "node", keep_gathered=keep, prefetch=0), fp.zero(3, "local", prefetch=0)
        step = fp.compile(fp.grad_and_value(fp.chain(fast, slow)(network)), mesh, bucket=bucket)
        results, program = optree.tree_leaves(step(params, x)), step.program
        nodes = list(program.traced.nodes)
        begin = next(index for index, node in enumerate(nodes) if info(node).backward)
        gathered = [one.axes for one in program.collectives() if one.kind == "all_gather" and one.backward]
        found.append((results, gathered, program.memory().curve[begin]))
    (plain, before, less), (same, after, more) = found
    assert all(map(torch.equal, plain, same))
    assert ("node",) in before and set(after) == {("local",)}
    needed = 8 * sum(w.numel() for w in params[1:])  # of which the backward computes gradients of inputs
    assert more - less == needed // local


@settings(max_examples=4, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.sampled_from(["int8", "int4"]), st.sampled_from([2, 16]))
def test_gathered_parameters_are_within_the_bound(rows: int, columns: int, form: str, block: int) -> None:
    """Each axis has its own format: the slow one that of the test, and the fast one sends all bits."""
    w = torch.randn(4 * rows, columns, dtype=torch.float64)
    fast, slow = fp.zero(3, "local", P("local")), fp.zero(3, "node", P("node"))
    formats = [fp.compress("local", gather="identity"), fp.compress("node", gather=form, block=block)]
    local = fp.chain(fast, slow, *formats)(lambda w, x: (w * x).sum())
    found = fp.compile(fp.grad(local, argnums=1), Mesh(node=2, local=2))(w, torch.ones(4, *w.shape, dtype=w.dtype))
    assert all(torch.equal(found[0], sample) for sample in found)  # the gathered parameter, on every rank
    shards = w.view(4, -1)
    allowed = bound(shards, [rows * columns], f"{form}/{block}").view_as(w)
    assert ((found[0] - w).abs() <= allowed + 1e-12).all()
    assert columns == 1 or not torch.equal(found[0], w)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_gradient_with_a_part_that_is_equal_on_all_ranks_is_compressed(stage: int) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ((w - 1).square().sum() + (w * x).sum(-1)).mean()

    plan = fp.chain(fp.zero(stage, "data"), fp.compress("data", gather=None))
    program = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), plan).lower(torch.zeros(4), torch.ones(2, 4))
    assert program.counts()["all_to_all", ("data",)] == 1


def test_the_loss_curve_is_that_of_exact_collectives() -> None:
    curves = []
    for more in ([], [fp.compress(("node", "local"))]):
        plan = fp.chain(BF16, *DATA["secondary"], *more)
        train = fp.train_step(loss, fp.optim.adamw(0.01), Mesh(node=2, local=2), plan)
        state, losses = train.init(optree.tree_map(torch.Tensor.float, parameters(2, 16))), []
        x, y = batch(32, 16)
        for _ in range(30):
            state, metrics = train(state, x.float(), y)
            losses.append(metrics.loss.item())
        curves.append(losses)
    exact, close = curves
    assert close[-1] < close[0] / 4
    assert max(abs(a - b) for a, b in zip(exact, close, strict=True)) < 0.05 * exact[0]


def test_an_overflow_skips_the_step() -> None:
    """An infinite gradient is still one after it was sent in 4 bits."""
    plan = fp.chain(
        fp.mixed_precision("fp16", loss_scale=fp.LossScale(2.0**40)), fp.zero(3, "data"), fp.compress("data")
    )
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), plan)
    state = train.init(optree.tree_map(torch.Tensor.float, parameters(2)))
    x, y = batch(8)
    state, metrics = train(state, x.float(), y)
    assert metrics.skipped
    assert torch.equal(train.params(state)["head"], parameters(2)["head"].float())


def on_rank(rank: int, mesh: Mesh) -> list[Any]:
    plan = fp.chain(
        *DATA["hybrid"], compressed(DATA["hybrid"], "int8", "int4", feedback=0.5)
    )  # every kind of collective
    return [x.tolist() for x in trained(plan, mesh, "auto", 2)[0]]


def test_processes_compute_the_bits_of_simulated_ranks() -> None:
    mesh = Mesh(node=2, local=2)
    results = run_on_processes(on_rank, 4, mesh, timeout=240)
    assert all(result == on_rank(0, mesh) for result in results)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fp.compress("data", gather="int3"), ValueError, r"compress\(gather='int3'\): it is 'int8', 'int4'"),
        (lambda: fp.compress("data", block=7), ValueError, "even number of elements"),
        (lambda: fp.chain(fp.compress("data"), fp.zero(3, "data")), OrderError, "belongs"),
        (lambda: fp.chain(fp.zero(3, "data"), fp.accumulate(2), fp.compress("data")), OrderError, r"write chain\("),
        (lambda: fp.compress("data")(loss), OrderError, "changes collectives of fp.zero or fp.data_parallel"),
        (
            lambda: fp.chain(TENSOR, fp.zero(3, "data"), fp.compress(("data", "tensor")))(loss),
            ValueError,
            "no gather of parameters or sum of gradients is over 'tensor'; the data axes of the plan are 'data'",
        ),
        (
            lambda: fp.chain(fp.zero(3, "data"), fp.compress("data"), fp.compress("data"))(loss),
            ValueError,
            "another compress inside of this one has the axis 'data'",
        ),
        (
            lambda: fp.chain(fp.zero(1, "data"), fp.compress("data"))(loss),
            ValueError,
            "gathers new parameters over 'data', and without masters",
        ),
        (
            lambda: fp.chain(fp.mixed_precision("bf16", masters=False), fp.zero(2, "data"), fp.compress("data"))(loss),
            ValueError,
            "put fp.mixed_precision",
        ),
    ],
)
def test_refused_by_name(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_new_parameters_with_masters_are_gathered_in_few_bits() -> None:
    """The masters stay exact: parameters that are kept in float32 are sent unchanged."""
    plan = fp.chain(fp.mixed_precision("bf16", keep="head"), fp.zero(1, "data"), fp.compress("data"))
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), plan, bucket=None)
    params = optree.tree_map(torch.Tensor.float, parameters(2))
    x, y = batch(8)
    state, _ = train(train.init(params), x.float(), y)
    gathers = {one.parameters: str(one.operand) for one in train.program.collectives() if one.kind == "all_gather"}
    assert gathers["head",] == "f32[4, 4]" and gathers["layers/0/a",] == "ui8[68]"
    exact = fp.train_step(
        loss, fp.optim.adamw(0.1), Mesh(data=2), fp.chain(*plan.transforms[:2], fp.compress("data", gather=None))
    )
    other, _ = exact(exact.init(params), x.float(), y)
    assert all(map(torch.equal, *map(optree.tree_leaves, (train.params(state), exact.params(other)))))
