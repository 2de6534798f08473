"""Error feedback of compressed sums: nothing is lost, nothing else changes, and the errors are part of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.ops.wire import as_sent
from sharding_specs import Mesh, P

from ..passes.networks import batch, loss, parameters
from ..processes import run_on_processes
from .test_compress import BF16, DATA

Tensors = dict[str, torch.Tensor]
SUMMED = {name: inner for name, inner in DATA.items() if name != "flat"}


def compressed(inner: list[Any], **options: Any) -> Any:
    return fp.compress([each.axis for each in reversed(inner)], gather=None, **options)


def errors_of(train: Any, state: Any) -> Tensors:
    found: Tensors = train.whole(state)[1].errors.errors
    return found


def linear(params: Tensors, scales: Tensors) -> torch.Tensor:
    """A loss whose gradients are the sums of the scales over the batch."""
    return sum((params[name] * scales[name]).sum() for name in params)  # type: ignore[return-value]


def drawn(seed: int, shape: tuple[int, ...], samples: int, dtype: torch.dtype = torch.float64) -> tuple[Tensors, Any]:
    make = torch.Generator().manual_seed(seed)
    params = {name: torch.zeros(size, dtype=dtype) for name, size in (("a", shape), ("b", shape[:1]))}

    def scales() -> Tensors:
        return {name: torch.randn(samples, *w.shape, generator=make, dtype=dtype) for name, w in params.items()}

    return params, scales


@settings(max_examples=5, deadline=None)
@given(
    inner=st.sampled_from(sorted(SUMMED)),
    after=st.sampled_from(["", "accumulate", "each", "offload", "tensor", "1f1b", "pipedream"]),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    form=st.sampled_from(["int4", "int8"]),
    bucket=st.sampled_from([None, "auto"]),
    seed=st.integers(0, 99),
)
def test_nothing_is_lost(inner: str, after: str, shape: tuple[int, int], form: str, bucket: Any, seed: int) -> None:
    """All that was sent, and what remains, are the sum of the true gradients."""
    shape = (2 * shape[0], shape[1]) if after == "tensor" else shape
    after = "" if after == "pipedream" and len(SUMMED[inner]) > 1 else after  # refused by name
    chosen, (params, scales) = SUMMED[inner], drawn(seed, shape, 8)
    outer = {"accumulate": [fp.accumulate(2)], "each": [fp.accumulate(2, reduce="each")]}
    outer["offload"] = [fp.offload(state="host")]
    outer |= {name: [fp.pipeline("pipe", schedule=name, microbatches=2)] for name in ("1f1b", "pipedream")}
    tensor = [fp.tensor_parallel("tensor", {"a": P("tensor")})] if after == "tensor" else []
    used = [each.axis for each in (*chosen, *tensor, *outer.get(after, [])) if hasattr(each, "axis")]
    mesh = Mesh(dict.fromkeys((axis for axis in used if axis != "microbatch"), 2))
    plan = fp.chain(*tensor, *chosen, compressed(chosen, reduce=form, block=4, feedback=1.0), *outer.get(after, []))
    train = fp.train_step(linear, fp.optim.sgd(1.0), mesh, plan, bucket=bucket)
    state, true = train.init(params), optree.tree_map(torch.zeros_like, params)
    for _ in range(3):
        given = scales()
        state, _ = train(state, given)
        true = {name: total + given[name].sum(0) for name, total in true.items()}
    sent, errors = train.params(state), errors_of(train, state)
    assert any(error.any() for error in errors.values())
    for name, w in params.items():
        rest = torch.zeros_like(w)
        for key, error in errors.items():
            if key.endswith(f": {name}"):
                rest += error.sum(0)[tuple(map(slice, w.shape))]
        torch.testing.assert_close(rest - sent[name], true[name], rtol=0, atol=1e-10)


@settings(max_examples=4, deadline=None)
@given(st.sampled_from([0, 1, 3]), st.sampled_from([0.25, 0.5, 1.0]), st.sampled_from([None, 2]), st.integers(2, 4))
def test_the_recurrence(stage: int, beta: float, reset: int | None, ranks: int) -> None:
    """Each rank sends h = g + e, and keeps (1 - beta) e + beta (h - sent); every `reset` steps e is 0."""
    plan = fp.chain(fp.zero(stage, "data"), fp.compress("data", gather=None, block=4, feedback=beta, reset=reset))
    params, scales = drawn(stage, (ranks * 2, 3), ranks)
    train = fp.train_step(linear, fp.optim.sgd(1.0), Mesh(data=ranks), plan)
    state = train.init(params)
    error, before = torch.zeros(ranks, ranks * 2, 3, dtype=torch.float64), params["a"]
    for step in range(1, 5):
        given = scales()
        state, _ = train(state, given)
        h = given["a"] + error
        sent = torch.stack([as_sent(row.flatten(), ranks, "int4/4").view_as(row) for row in h])
        error = (1 - beta) * error + beta * (h - sent)
        error = error * 0 if reset is not None and step % reset == 0 else error
        torch.testing.assert_close(before - train.params(state)["a"], sent.sum(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(errors_of(train, state)["data: a"], error, rtol=0, atol=1e-12)
        before = train.params(state)["a"]


def test_a_quadratic_converges_where_it_stalls_without() -> None:
    """Large gradients that cancel between the ranks make the scale of a block so large that others round to 0."""
    target = torch.linspace(-1, 1, 16)
    apart = torch.zeros(2, 16)
    apart[:, 0] = torch.tensor([100.0, -100.0])

    def quadratic(w: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
        return ((w - target).square().sum() / 2 + (w * apart).sum(-1)).mean()  # the first sum is equal on all ranks

    far = []
    for options in ({}, {"feedback": 1.0}):
        plan = fp.chain(fp.zero(2, "data"), fp.compress("data", gather=None, block=8, **options))
        train = fp.train_step(quadratic, fp.optim.sgd(0.01), Mesh(data=2), plan)
        state = train.init(torch.zeros(16))
        for _ in range(400):
            state, _ = train(state, apart)
        far.append((train.params(state) - target)[1:8].abs().max().item())
    assert far[0] == target[1:8].abs().max() and far[1] < 0.15


@pytest.mark.parametrize("more", ["accumulate", "pipeline"])
def test_a_skipped_step_keeps_the_errors(more: str) -> None:
    """The errors are those of gradients without a scale: a step at a scale 2 ** 4 lower changes no bit of them."""
    outer = {"accumulate": fp.accumulate(2), "pipeline": fp.pipeline("pipe", schedule="1f1b", microbatches=2)}[more]
    mesh = Mesh(data=2, **({"pipe": 2} if more == "pipeline" else {}))
    x, y = batch(8)
    found = []
    for scale in (2.0**8, 2.0**4):
        rules = fp.LossScale(scale, hysteresis=1)
        precision = fp.mixed_precision("fp16", loss_scale=rules)
        plan = fp.chain(precision, fp.zero(1, "data"), fp.compress("data", feedback=0.5), outer)
        train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan)
        state = train.init(optree.tree_map(torch.Tensor.float, parameters(2)), batch=(x.float(), y))
        state, metrics = train(state, x.float(), y)
        assert not metrics.skipped
        before = errors_of(train, state)
        assert any(error.any() for error in before.values())
        state, metrics = train(state, x.float() * 1e6, y)
        assert metrics.skipped
        assert all(map(torch.equal, *map(optree.tree_leaves, (before, errors_of(train, state)))))
        state, metrics = train(state, x.float(), y)
        assert not metrics.skipped
        found.append(errors_of(train, state))
    for key, error in found[0].items():
        torch.testing.assert_close(found[1][key], error, rtol=0.02, atol=1e-5)


def step_on(ranks: int, stage: int, feedback: float | None = 0.5) -> Any:
    plan = fp.chain(fp.zero(stage, "data"), fp.compress("data", gather=None, block=4, feedback=feedback))
    return fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=ranks), plan)


def test_errors_are_saved_and_divided_among_other_ranks(tmp_path: Path) -> None:
    train, given = step_on(4, 3), batch(24)
    state = train.init(parameters(2))
    for _ in range(2):
        state, _ = train(state, *given)
    train.save(state, tmp_path)
    errors = errors_of(train, state)
    for again in (train.restore(tmp_path), train.load(*train.whole(state), 2)):
        both = [train.whole(train(each, *given)[0]) for each in (train.copy(state), again)]
        assert all(map(torch.equal, *map(optree.tree_leaves, both)))
    for ranks, stage in ((2, 3), (3, 0), (8, 1)):
        other = step_on(ranks, stage)
        for moved in (other.restore(tmp_path), other.load(state)):
            for key, error in errors_of(other, moved).items():
                common = tuple(map(slice, map(min, error.shape[1:], errors[key].shape[1:])))
                sums = [each.sum(0)[common] for each in (errors[key], error)]
                torch.testing.assert_close(*sums, rtol=0, atol=1e-14)
                assert error.shape[0] == ranks and sums[0].any()
    plain = step_on(2, 3, None)
    plain.save(plain.restore(tmp_path), tmp_path / "plain")  # a step without feedback leaves them out
    assert not any(error.any() for error in errors_of(train, train.restore(tmp_path / "plain")).values())


def on_rank(rank: int) -> list[Any]:
    plan = fp.chain(*DATA["nested"], compressed(DATA["nested"], block=4, feedback=0.5))
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(node=2, local=2), plan, reduction="ordered")
    state = train.init(parameters(2))
    for _ in range(2):
        state, _ = train(state, *batch(8))
    other = step_on(4, 1)
    return [x.tolist() for x in optree.tree_leaves((train.whole(state), other.whole(other.load(state))))]


@pytest.mark.slow
def test_processes_compute_the_bits_of_simulated_ranks() -> None:
    results = run_on_processes(on_rank, 4, timeout=240)
    assert all(result == on_rank(0) for result in results)


def test_as_many_bytes_are_sent_and_errors_are_memory_of_the_state() -> None:
    found = []
    for options in ({}, {"feedback": 1.0}):
        inner = DATA["nested"]
        train = fp.train_step(
            loss, fp.optim.sgd(0.1), Mesh(node=2, local=2), fp.chain(BF16, *inner, compressed(inner, **options))
        )
        program = train.lower(optree.tree_map(torch.Tensor.float, parameters(2, 16)), *batch(8, 16))
        state = sum(info(node).nbytes for node in program.traced.inputs if info(node).is_state)
        found.append((program.bytes_sent(), state))
    assert found[0][0] == found[1][0]
    elements = sum(w.numel() for w in optree.tree_leaves(parameters(2, 16)))
    assert found[1][1] - found[0][1] == 4 * (elements + elements // 2) + 8


def test_the_bits_are_those_without_if_nothing_is_lost() -> None:
    """Beside `test_compress.py`, which has all plans: with a frozen parameter."""
    optimizer = fp.optim.by_path({"frozen": None, "*": fp.optim.adamw(0.1)})
    params = {"used": torch.randn(5, 3), "frozen": torch.randn(3)}
    results = []
    for feedback in (None, 0.5):
        plan = fp.chain(fp.zero(1, "data"), fp.compress("data", gather=None, reduce="identity", feedback=feedback))
        train = fp.train_step(lambda p, x: (x @ p["used"] * p["frozen"]).mean(), optimizer, Mesh(data=2), plan)
        state, _ = train(train.init(params), torch.ones(4, 5))
        results.append(train.params(state))
    assert all(map(torch.equal, *map(optree.tree_leaves, results)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fp.compress("data", feedback=0.0), r"compress\(feedback=0.0\): it is the weight"),
        (lambda: fp.compress("data", feedback=1.5), r"compress\(feedback=1.5\): it is the weight"),
        (lambda: fp.compress("data", reset=3), r"compress\(reset=3\): it is a number of steps, and needs feedback="),
        (lambda: fp.compress("data", feedback=1.0, reset=0), r"compress\(reset=0\): it is a number of steps"),
        (
            lambda: fp.chain(fp.zero(3, "data"), fp.compress("data", reduce=None, feedback=1.0))(loss),
            "feedback=1 does not go with reduce=None",
        ),
        (
            lambda: fp.chain(
                fp.zero(1, "data", layout="flat"), fp.compress("data", gather=None, feedback=1.0)
            )(loss),
            r"feedback=1 does not go with fp.zero\(layout='flat'\)",
        ),
        (
            lambda: fp.chain(
                *DATA["nested"], fp.compress("local", feedback=1.0), fp.compress("node", feedback=1.0)
            )(loss),
            "feedback=1 does not go with another compress with feedback=",
        ),
        (
            lambda: fp.train_step(
                linear, fp.optim.sgd(0.1), Mesh(node=2, local=2, pipe=2),
                fp.chain(
                    *DATA["nested"], compressed(DATA["nested"], feedback=1.0),
                    fp.pipeline("pipe", schedule="pipedream", microbatches=2),
                ),
            ).lower(drawn(0, (4, 2), 8)[0], drawn(0, (4, 2), 8)[1]()),
            r"the gradient of \w is summed where no error of it is held",
        ),
        (
            lambda: fp.compile(
                fp.grad(fp.chain(fp.zero(3, "data"), fp.compress("data", feedback=1.0))(loss)), Mesh(data=2)
            )(parameters(1), *batch(4)),
            "in a program without a state, which fp.train_step has",
        ),
    ],
)  # fmt: skip
def test_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_sum_in_another_order_is_sent_with_all_bits() -> None:
    """A kept parameter without a shard over the slow axis is summed over it first, in full; replicas stay equal."""

    def kept(params: Tensors, x: torch.Tensor) -> torch.Tensor:
        return (torch.nn.functional.layer_norm(x @ params["w"], (8,), params["norm"]) ** 2).mean()

    inner = fp.chain(fp.zero(3, "local"), fp.zero(3, "node", whole_below=64))
    plan = fp.chain(BF16, inner, fp.compress(("node", "local"), block=4, feedback=1.0))
    train = fp.train_step(kept, fp.optim.sgd(0.1), Mesh(node=2, local=2), plan)
    state = train.init({"w": torch.randn(8, 8), "norm": torch.ones(8)})
    for _ in range(2):
        state, _ = train(state, torch.randn(8, 8))
    errors = errors_of(train, state)
    assert not errors["node: norm"].any() and errors["local+node: w"].any() and errors["node: w"].any()
