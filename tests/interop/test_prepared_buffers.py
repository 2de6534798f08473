"""`fp.prepare` of modules with buffers: batch norm as DDP and SyncBatchNorm compute it, spectral norm, own buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_parallel as fp
from sharding_specs import Mesh

from ..models.ranks_by_hand import tensors_of, trained_by_hand
from ..processes import run_on_processes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.pool = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4, momentum=None))
        self.head = nn.Linear(4, 3)
        self.register_buffer("shift", torch.tensor([0.5, 0.0, -0.5]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.pool(self.stem(x)))) + self.shift


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(count, 8, 2, 3, 3, generator=draw).double()
    return [(x, torch.randint(3, (8,), generator=draw)) for x in images]


def loss(model: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def require_equal(
    made: Callable[[], nn.Module],
    mesh: Mesh,
    plan: Any,
    ranks: int,
    microbatches: int,
    over_ranks: bool = False,
    **o: Any,
) -> Any:
    reference, module = made(), made()
    wanted = trained_by_hand(reference, optimizer_of(reference), loss, batches(), ranks, microbatches, over_ranks)
    step = fp.prepare(module, optimizer_of(module), loss=loss, mesh=mesh, plan=plan, **o)
    close([step(*batch) for batch in batches()], wanted)
    assert step.module() is module
    close(tensors_of(module), tensors_of(reference))
    evaluate, x = step.eval(lambda model, x: model(x)), batches()[0][0]
    close(evaluate(x), reference.eval()(x))
    assert module.training
    return step


TWO = Mesh(data=2)
PLANS = {
    "ddp": (TWO, fp.data_parallel("data"), 2, 1),
    "zero-3, accumulated": (TWO, fp.chain(fp.zero(3, "data"), fp.accumulate(2)), 2, 2),
}


@pytest.mark.parametrize("statistics", ["rank", "all"])
@pytest.mark.parametrize("plan", PLANS)
def test_batch_norm_is_that_of_torch(plan: str, statistics: str) -> None:
    require_equal(net, *PLANS[plan], statistics == "all", statistics=statistics)


def test_sync_batch_norm_takes_the_statistics_of_all_ranks() -> None:
    module, plan = nn.SyncBatchNorm.convert_sync_batchnorm(net()), fp.data_parallel("data")
    reference = net()
    wanted = trained_by_hand(reference, optimizer_of(reference), loss, batches(), 2, 1, over_ranks=True)
    step = fp.prepare(module, optimizer_of(module), loss=loss, mesh=TWO, plan=plan)
    close([step(*batch) for batch in batches()], wanted)


class OwnForward(nn.BatchNorm2d):
    """A subclass that calls the function itself, as those of timm do."""

    def forward(self, input: Tensor) -> Tensor:
        statistics = (self.running_mean, self.running_var)
        return nn.functional.batch_norm(input, *statistics, self.weight, bias=self.bias, training=self.training)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnForward(2)
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(18, 6))
        self.second = nn.utils.spectral_norm(nn.Linear(6, 3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(self.norm(x).flatten(1))))
        self.calls = self.calls + 1
        if not self.training:
            return h - self.mean
        self.mean.lerp_(h.detach().mean(0), 0.25)
        return h


def counted() -> nn.Module:
    torch.manual_seed(0)
    return Counted().double()


def test_other_modules_write_their_buffers_once_per_step() -> None:
    step = require_equal(counted, Mesh(), None, 1, 1)
    assert step.train.buffers(step.state)["calls"] == 3
    require_equal(counted, TWO, fp.zero(1, "data"), 1, 1, statistics="all")


def test_a_loss_may_call_the_model_twice() -> None:
    def twice(model: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(model, x, y) + (model(2 * x) - 1).square().mean()

    module, reference = net(), net()
    optimizer = optimizer_of(reference)
    step = fp.prepare(module, optimizer_of(module), loss=twice, mesh=Mesh())
    for batch in batches():
        value = twice(reference, *batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        close(step(*batch), value.detach())
    step.module()
    close(tensors_of(module), tensors_of(reference))


def test_buffers_that_are_not_persistent_are_constants(tmp_path: Path) -> None:
    class Lost(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("sum", torch.zeros(3), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.sum += x.sum(0)
            return super().forward(x)

    module = Lost()
    step = fp.prepare(module, optimizer_of(module), loss=lambda model, x: model(x).sum(), mesh=Mesh())
    with pytest.raises(ValueError, match=r"for a module's buffers: fp.functional\(module, buffers=True\)"):
        step(torch.ones(2, 3))
    module = net()
    step = fp.prepare(module, optimizer_of(module), loss=loss, mesh=Mesh(data=1))
    step(*batches()[0])
    assert "shift" not in step.train.buffers(step.state)
    step.train.save(step.state, tmp_path)
    other = net()
    again = fp.prepare(other, optimizer_of(other), loss=loss, mesh=TWO, plan=fp.zero(3, "data"))
    again.state = again.train.restore(tmp_path)
    torch.testing.assert_close(again.module().state_dict(), step.module().state_dict(), rtol=0, atol=0)


def test_a_module_in_eval_mode_keeps_its_statistics() -> None:
    module = net()
    module.stem.eval()  # type: ignore[union-attr]
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    step = fp.prepare(module, optimizer_of(module), loss=loss, mesh=TWO, plan=fp.data_parallel("data"))
    step(*batches()[0])
    changed = {name for name, buffer in step.module().named_buffers() if not torch.equal(buffer, before[name])}
    assert changed == {"pool.2.running_mean", "pool.2.running_var", "pool.2.num_batches_tracked"}


def test_a_batch_must_divide_by_ranks_and_microbatches() -> None:
    module, plan = net(), fp.chain(fp.data_parallel("data"), fp.accumulate(3))
    step = fp.prepare(module, optimizer_of(module), loss=loss, mesh=TWO, plan=plan)
    with pytest.raises(ValueError, match="its dim 0 does not divide by 2 ranks × 3 microbatches"):
        step(*batches()[0])


def on_a_rank(rank: int) -> Any:
    module = net()
    step = fp.prepare(module, optimizer_of(module), loss=loss, batch="own")
    losses = [step(*(each.chunk(2)[rank] for each in batch)) for batch in batches()]
    return losses, tensors_of(step.module())


def test_processes_that_read_their_own_batches() -> None:
    reference = net()
    wanted = trained_by_hand(reference, optimizer_of(reference), loss, batches(), 2, 1)
    for losses, found in run_on_processes(on_a_rank, 2):
        close((losses, found), (wanted, tensors_of(reference)))
