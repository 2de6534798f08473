"""Buffers are a part of the training state: updated by the step, saved, restored and evaluated with, on every plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..models.ranks_by_hand import tensors_of, trained_by_hand
from ..processes import run_on_processes

SPLIT = {"stem.weight": P("tensor"), "norm.*": P("tensor"), "conv.weight": P(None, "tensor")}
PLANS: dict[str, tuple[Any, Mesh, int, int]] = {  # plan, mesh, ranks that split the batch, microbatches
    "one device": (None, Mesh(), 1, 1),
    "ddp": (fp.data_parallel("data"), Mesh(data=4), 4, 1),
    "zero-1": (fp.zero(1, "data", layout="flat"), Mesh(data=2), 2, 1),
    "zero-3, accumulated": (fp.chain(fp.zero(3, "data"), fp.accumulate(2)), Mesh(data=2), 2, 2),
    "accumulated": (fp.accumulate(4), Mesh(), 1, 4),
    "two data axes": (fp.chain(fp.zero(3, "shard"), fp.data_parallel("data")), Mesh(data=2, shard=2), 4, 1),
    "tensor": (
        fp.chain(fp.tensor_parallel("tensor", SPLIT), fp.zero(2, "data"), fp.accumulate(2)),
        Mesh(data=2, tensor=2),
        2,
        2,
    ),
    "pipeline": (fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2)), Mesh(data=2, pipe=2), 2, 2),
    "master": (fp.data_parallel("data", master=0), Mesh(data=2), 2, 1),
}


class Net(nn.Module):
    def __init__(self, width: int, momentum: float | None, affine: bool, flat: bool) -> None:
        super().__init__()
        norm: Any = nn.BatchNorm1d if flat else nn.BatchNorm2d
        self.stem = nn.Linear(3, width) if flat else nn.Conv2d(3, width, 2)
        self.norm = norm(width, momentum=momentum)
        self.conv = nn.Linear(width, 2) if flat else nn.Conv2d(width, 2, 2)
        self.last = norm(2, momentum=momentum, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(torch.tanh(self.norm(self.stem(x))))
        return self.last(h).flatten(1).sum(1)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def net(*shape: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net(*shape).double()


def batches(count: int, samples: int, flat: bool, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    shape = (samples, 3) if flat else (samples, 3, 4, 4)
    pairs = [(torch.randn(shape, generator=draw), torch.randn(samples, generator=draw)) for _ in range(count)]
    return [(x.double(), y.double()) for x, y in pairs]


def step_of(module: nn.Module, plan: Any, mesh: Mesh, groups: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    fn, params, buffers = fp.functional(module, buffers=True, groups=groups)

    def loss(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        result, new = fn(params, buffers, x)
        return (result - y).square().mean(), new

    train = fp.train_step(loss, fp.optim.sgd(0.05, momentum=0.9), mesh, plan, buffers=buffers, **options)
    return train, fn, params, buffers


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@given(
    plan=st.sampled_from([*PLANS]),
    shape=st.tuples(st.sampled_from([2, 4]), st.sampled_from([0.1, 0.4, None]), st.booleans(), st.booleans()),
    samples=st.integers(2, 3),
    over_ranks=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=9, deadline=None)
def test_a_step_is_a_loop_over_ranks(plan: str, shape: Any, samples: int, over_ranks: bool, seed: int) -> None:
    transform, mesh, ranks, microbatches = PLANS[plan]
    reference, flat = net(*shape, seed=seed), shape[3]
    data = batches(2, samples * ranks * microbatches, flat, seed)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(net(*shape, seed=seed)) if over_ranks else net(*shape, seed=seed)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    losses = trained_by_hand(reference, optimizer, loss_of, data, ranks, microbatches, over_ranks)
    train, _, params, _ = step_of(module, transform, mesh, (ranks, microbatches))
    state, found = train.init(params), []
    for batch in data:
        state, metrics = train(state, *batch)
        found.append(metrics.loss)
    close(found, losses)
    close((train.params(state), train.buffers(state)), tensors_of(reference))


@pytest.mark.parametrize("plan", ["ddp", "tensor", "accumulated"])
def test_without_groups_the_statistics_are_those_of_the_global_batch(plan: str) -> None:
    transform, mesh, *_ = PLANS[plan]
    reference, data = net(4, 0.1, True, True), batches(2, 8, True)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    losses = trained_by_hand(reference, optimizer, loss_of, data, 1, 1)
    train, _, params, _ = step_of(net(4, 0.1, True, True), transform, mesh, None)
    state = train.init(params)
    for batch, wanted in zip(data, losses, strict=True):
        state, metrics = train(state, *batch)
        close(metrics.loss, wanted)
    close((train.params(state), train.buffers(state)), tensors_of(reference))


def test_statistics_of_each_rank_need_one_sum_per_norm() -> None:
    train, _, params, _ = step_of(net(4, 0.1, True, True), fp.data_parallel("data"), Mesh(data=2), (2, 1))
    without, *_ = step_of(net(4, 0.1, True, True).eval(), fp.data_parallel("data"), Mesh(data=2), None)
    counts = []
    for each in (train, without):
        each.lower(params, *batches(1, 8, True)[0])
        counts.append(each.program.counts()[("psum", ("data",))])
    assert counts[0] - counts[1] == 2


@pytest.mark.parametrize(("saved_by", "restored_by"), [("zero-3, accumulated", "ddp"), ("pipeline", "tensor")])
def test_a_checkpoint_is_restored_on_another_plan(saved_by: str, restored_by: str, tmp_path: Path) -> None:
    (module, data), steps = (net(4, None, True, True), batches(3, 8, True)), []
    for plan in (saved_by, restored_by):
        transform, mesh, *_ = PLANS[plan]
        steps.append(step_of(module, transform, mesh, (2, 2)))
    (train, _, params, _), (other, fn, *_) = steps
    state = train.init(params)
    for batch in data[:2]:
        state, _ = train(state, *batch)
    train.save(state, tmp_path)
    again = other.restore(tmp_path)
    loaded = other.load(*train.whole(state), state.step)
    for each in (again, loaded):
        torch.testing.assert_close(other.buffers(each), train.buffers(state), rtol=0, atol=0)
        torch.testing.assert_close(other.params(each), train.params(state), rtol=0, atol=0)
    plan = PLANS[restored_by][0]
    module.eval()
    evaluate = other.compile(plan(lambda params, buffers, x: fn(params, buffers, x)[0]))
    x = data[2][0]
    close(evaluate(again, x), fn(other.params(again), other.buffers(again), x)[0])
    module.train()
    (state, metrics), (again, others) = train(state, *data[2]), other(again, *data[2])
    close(others.loss, metrics.loss)
    close(other.buffers(again), train.buffers(state))


class Written(nn.Module):
    """A module that writes buffers in all the ways of a forward."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("total", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(samples, dtype=torch.float64))
        self.register_buffer("turned", torch.zeros(3 * samples, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.total += x.sum(0)
            self.steps = self.steps + 1
            self.seen.copy_(x[:, 0])
            self.turned.copy_(x.T.reshape(-1))
            self.largest = torch.maximum(self.largest, x.max())
        return (x * self.weight).sum(1) + self.steps


@pytest.mark.parametrize("plan", ["ddp", "zero-3, accumulated", "two data axes", "pipeline"])
def test_modules_that_write_buffers_write_what_one_device_does(plan: str) -> None:
    transform, mesh, *_ = PLANS[plan]
    module, reference = Written(8), Written(8)
    train, _, params, _ = step_of(module, transform, mesh, None)
    state = train.init(params)
    for seed in range(2):
        x = torch.randint(-9, 9, (8, 3), generator=torch.Generator().manual_seed(seed)).double()
        state, _ = train(state, x, torch.zeros(8, dtype=torch.float64))
        reference(x)
    found = train.buffers(state)
    torch.testing.assert_close(found, dict(reference.named_buffers()), rtol=0, atol=0)


SPECTRAL = {"parametrization": nn.utils.parametrizations.spectral_norm, "hook": nn.utils.spectral_norm}


@pytest.mark.parametrize("kind", SPECTRAL)
def test_the_power_iteration_of_spectral_norm_goes_on(kind: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(SPECTRAL[kind](nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()

    reference, data = made(), batches(3, 4, True)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    losses = trained_by_hand(reference, optimizer, loss_of, data, 1, 1)
    train, _, params, _ = step_of(made(), fp.zero(3, "data"), Mesh(data=2), None)
    state, found = train.init(params), []
    for batch in data:
        state, metrics = train(state, *batch)
        found.append(metrics.loss)
    close(found, losses)
    close(train.buffers(state), dict(reference.named_buffers()))


def test_mixed_precision_keeps_them_in_float32_and_a_skipped_step_keeps_the_new_ones() -> None:
    module = net(4, 0.1, True, True).float()
    precision = fp.mixed_precision("fp16", loss_scale=fp.LossScale(2.0**40, fail_at_minimum=False))
    plan = fp.chain(precision, fp.data_parallel("data"))
    train, _, params, before = step_of(module, plan, Mesh(data=2), (2, 1))
    state = train.init(params)
    x, y = (each.float() for each in batches(1, 8, True)[0])
    state, metrics = train(state, x, y)
    assert metrics.skipped and all(torch.equal(train.params(state)[name], params[name]) for name in params)
    after = train.buffers(state)
    module(x[:4])  # of rank 0
    for name, buffer in module.named_buffers():
        assert after[name].dtype == before[name].dtype
        torch.testing.assert_close(after[name], buffer, rtol=0.02, atol=1e-3)
    assert int(after["norm.num_batches_tracked"]) == 1


def test_aux_and_keywords_go_with_buffers() -> None:
    fn, params, buffers = fp.functional(net(2, 0.1, True, True), buffers=True)

    def loss(params: Any, buffers: Any, x: Tensor, *, y: Tensor) -> Any:
        result, new = fn(params, buffers, x)
        return (result - y).square().mean(), (new, {"result": result})

    def positional(params: Any, buffers: Any, x: Tensor, y: Tensor) -> Any:
        return loss(params, buffers, x, y=y)

    plan = fp.chain(fp.zero(2, "data"), fp.accumulate(2))
    train = fp.train_step(positional, fp.optim.sgd(0.1), Mesh(data=2), plan, buffers=buffers, has_aux=True)
    x, y = batches(1, 8, True)[0]
    state, metrics = train(train.init(params), x, y=y)
    wanted, (new, aux) = positional(params, buffers, x, y)
    close((metrics.loss, metrics.aux, train.buffers(state)), (wanted, aux, new))


def on_a_rank(rank: int, folder: str) -> Any:
    plan, mesh, *_ = PLANS["zero-3, accumulated"]
    train, _, params, _ = step_of(net(4, 0.1, True, True), plan, mesh, (2, 2))
    state, losses = train.init(params), []
    for batch in batches(2, 8, True):
        state, metrics = train(state, *batch)
        losses.append(metrics.loss)
    train.save(state, folder)
    again = train.restore(folder)
    same = all(torch.equal(a, b) for a, b in zip(*(train.buffers(s).values() for s in (again, state)), strict=True))
    uneven = {"norm.running_mean": torch.full((4,), float(rank), dtype=torch.float64)}
    fn, params, buffers = fp.functional(net(4, 0.1, True, True), buffers=True)
    wrong = fp.train_step(lambda p, b, x: (fn(p, b, x)[0].sum(), b), fp.optim.sgd(0.1), mesh, buffers=buffers | uneven)
    with pytest.raises(fp.errors.InputMismatchError, match=r"norm\.running_mean"):
        wrong.init(params)
    return losses, train.params(state), train.buffers(state), same


def test_processes_train_as_the_ranks_of_a_loop(tmp_path: Path) -> None:
    reference = net(4, 0.1, True, True)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    losses = trained_by_hand(reference, optimizer, loss_of, batches(2, 8, True), 2, 2)
    for found, params, buffers, same in run_on_processes(on_a_rank, 2, str(tmp_path)):
        close(found, losses)
        close((params, buffers), tensors_of(reference))
        assert same


# --- Refusals ---


def step_that_returns(change: Callable[[Any, Tensor], Any], **options: Any) -> Any:
    buffers = {"mean": torch.zeros(3), "count": torch.tensor(0)}
    train = fp.train_step(
        lambda w, buffers, x: ((x * w).sum(), change(buffers, x)),
        fp.optim.sgd(0.1),
        Mesh(data=2),
        fp.data_parallel("data"),
        buffers=buffers,
        **options,
    )
    return train(train.init(torch.ones(3)), torch.ones(4, 3))


def test_what_a_loss_returns_must_be_the_buffers() -> None:
    state, _ = step_that_returns(lambda b, x: {"mean": x.mean(0), "count": b["count"] + 1})
    assert state.step == 1
    with pytest.raises(ValueError, match=r"mean: \(4, 3\) floating, and the loss takes \(3,\) floating"):
        step_that_returns(lambda b, x: {**b, "mean": x})
    with pytest.raises(ValueError, match=r"count: \(\) floating, and the loss takes \(\) int64"):
        step_that_returns(lambda b, x: {**b, "count": x.sum()})
    with pytest.raises(ValueError, match=r"count: nothing, and the loss takes \(\) int64"):
        step_that_returns(lambda b, x: {"mean": b["mean"]})
    with pytest.raises(ValueError, match=r"more: \(\) floating, and the loss takes nothing"):
        step_that_returns(lambda b, x: {**b, "more": x.sum()})
    with pytest.raises(ValueError, match=r"must return \(value, \(new buffers, aux\)\)"):
        step_that_returns(lambda b, x: b, has_aux=True)
    with pytest.raises(ValueError, match=r"must return \(value, new buffers\)"):
        train, _, params, buffers = step_of(net(2, 0.1, True, True), None, Mesh(), None)
        train = fp.train_step(lambda p, b, x: x.sum(), fp.optim.sgd(0.1), Mesh(), buffers=buffers)
        train(train.init(params), torch.ones(2))


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"takes a dict of tensors, .* found rate"):
        fp.train_step(lambda p, b, x: (p, b), fp.optim.sgd(0.1), Mesh(), buffers={"rate": 0.1})
    pipe = fp.pipeline("pipe", schedule="pipedream", microbatches=4)
    for plan, mesh in ((pipe, Mesh(pipe=2)), (fp.local_sgd("data", inner=2), Mesh(data=2))):
        with pytest.raises(ValueError, match=r"train_step\(buffers=…\): .* has replicas or an asynchronous pipeline"):
            step_of(net(2, 0.1, True, True), plan, mesh, None)
    with pytest.raises(ValueError, match=r"groups=\(2, 0\)\): give the numbers \(ranks, microbatches\)"):
        fp.functional(net(2, 0.1, True, True), buffers=True, groups=(2, 0))
    train, _, params, _ = step_of(net(2, 0.1, True, True), fp.data_parallel("data"), Mesh(data=2), (2, 3))
    with pytest.raises(ValueError, match=r"dim 0 does not divide by 2 ranks × 3 microbatches"):
        train(train.init(params), *batches(1, 8, True)[0])
    plain = fp.train_step(lambda w, x: (w * x).sum(), fp.optim.sgd(0.1), Mesh(data=1))
    state = plain.init(torch.ones(3))
    with pytest.raises(ValueError, match="this step has no buffers"):
        plain.buffers(state)
    plain.save(state, tmp_path)
    kept = fp.train_step(
        lambda w, b, x: ((w * x).sum(), b), fp.optim.sgd(0.1), Mesh(data=1), buffers={"a": torch.ones(1)}
    )
    with pytest.raises(fp.errors.CheckpointError, match="the checkpoint does not have it"):
        kept.restore(tmp_path)
    pipeline = fp.pipeline("pipe", microbatches=2)
    train, _, params, _ = step_of(net(4, 0.1, True, True), pipeline, Mesh(pipe=2), None)
    with pytest.raises(fp.errors.PipelineError, match=r"groups=\(ranks, microbatches\)"):
        train(train.init(params), *batches(1, 8, True)[0])
