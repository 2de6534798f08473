"""Training loops of torch: `fp.prepare` makes the same updates as the module, optimizer and scheduler do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from .scripts import ROOT, changed_lines, printed

Scheduler = Callable[[torch.optim.Optimizer], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(2)])
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.ones(6))  # in no group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) * self.scale
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 5, (8,), generator=draw), torch.randint(0, 5, (8,), generator=draw)) for _ in range(count)
    ]


def loss(model: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def two_groups(module: Net, kind: Any = torch.optim.AdamW, lr: float = 1e-2, **options: Any) -> torch.optim.Optimizer:
    plain = [p for name, p in module.named_parameters() if name != "scale" and p.ndim == 1]
    matrices = [p for name, p in module.named_parameters() if name != "scale" and p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": plain, "lr": lr / 2, "weight_decay": 0.0}]
    return kind(groups, lr=lr, **options)


def by_torch(module: Net, optimizer: torch.optim.Optimizer, scheduler: Any, clip: float | None = None) -> list[float]:
    losses = []
    for x, y in batches():
        value = loss(module, x, y)
        value.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in module.parameters() if p is not module.scale], clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        module.zero_grad()
        losses.append(value.item())
    return losses


def require_equal(kind: Any, schedule: Scheduler | None, plan: Any, mesh: Mesh, clip: float | None = None) -> None:
    module = net()
    optimizer = kind(module)
    scheduler = schedule(optimizer) if schedule else None
    step = fp.prepare(module, optimizer, scheduler, loss=loss, mesh=mesh, plan=plan, clip=clip)
    found = [step(*batch).item() for batch in batches()]
    reference = net()
    own = kind(reference)
    want = by_torch(reference, own, schedule(own) if schedule else None, clip)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    assert step.module() is module
    for (name, mine), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


OPTIMIZERS = {
    "adamw": two_groups,
    "adam": lambda module: two_groups(module, torch.optim.Adam, betas=(0.8, 0.9), eps=1e-6),
    "sgd": lambda module: two_groups(module, torch.optim.SGD, momentum=0.9, nesterov=True),
    "sgd with dampening": lambda module: two_groups(module, torch.optim.SGD, momentum=0.9, dampening=0.1),
    "adafactor": lambda module: two_groups(module, torch.optim.Adafactor),
}
SCHEDULERS: dict[str, Scheduler] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1.0 if n < 3 else 0.5**n),
    "a lambda per group": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 1 / (1 + n), lambda n: 0.9**n]),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "steps": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], gamma=0.3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=8, cycle_momentum=False),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2, cycle_momentum=False),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.8)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=3), lr_scheduler.StepLR(o, 2)], optimizer=o
    ),
}


CYCLES: dict[str, tuple[Any, Scheduler, int]] = {
    "sgd": (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=9),
        1,
    ),
    "nesterov": (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda o: lr_scheduler.CyclicLR(o, 1e-2, 1e-1, step_size_up=3),
        1,
    ),
    "adamw": (torch.optim.AdamW, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9), 1),
    "adam, in epochs": (torch.optim.Adam, lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9), 2),
    "second of a sequence": (
        torch.optim.AdamW,
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.OneCycleLR(o, 0.1, total_steps=9)], [3]
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", CYCLES)
@pytest.mark.parametrize("layout", ["dims", "flat"])
def test_schedulers_that_cycle_the_momentum(name: str, layout: str) -> None:
    """They were refused, although it is the default of OneCycleLR."""
    kind, schedule, every = CYCLES[name]
    module, reference = net().double(), net().double()
    optimizer, own = kind(module.parameters()), kind(reference.parameters())
    plan = fp.zero(1, "data", layout=layout)
    step = fp.prepare(
        *(module, optimizer, schedule(optimizer)), loss=loss, mesh=Mesh(data=2), plan=plan, scheduler_every=every
    )
    scheduler = schedule(own)
    for number, (x, y) in enumerate(batches(8), 1):
        value = loss(reference, x, y)
        own.zero_grad()
        value.backward()
        own.step()
        if number % every == 0:
            scheduler.step()
        torch.testing.assert_close(step(x, y), value.detach(), rtol=0, atol=1e-10)
    for mine, theirs in zip(step.module().parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_with_groups_update_as_in_torch(optimizer: str) -> None:
    require_equal(OPTIMIZERS[optimizer], SCHEDULERS["cosine"], None, Mesh(), clip=0.5)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_give_the_rates_of_torch(scheduler: str) -> None:
    require_equal(two_groups, SCHEDULERS[scheduler], None, Mesh())


PLANS = {
    "zero-1, flat": (fp.zero(1, "data", layout="flat"), Mesh(data=2)),
    "zero-3, accumulated": (fp.chain(fp.zero(3, "data"), fp.accumulate(2)), Mesh(data=2)),
    "tensor": (
        fp.chain(fp.tensor_parallel("tensor", {"*1.weight": P("tensor", None)}), fp.data_parallel("data")),
        Mesh(data=2, tensor=2),
    ),
}


@pytest.mark.parametrize("plan", PLANS)
def test_plans_change_nothing(plan: str) -> None:
    require_equal(two_groups, SCHEDULERS["cosine"], *PLANS[plan], clip=0.5)


def test_a_scheduler_per_epoch() -> None:
    module = net()
    optimizer = two_groups(module)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step = fp.prepare(module, optimizer, scheduler, loss=loss, mesh=Mesh(), scheduler_every=2)
    rates = []
    for batch in batches(4):
        step(*batch)
        rates.append([rate.item() for rate in step.metrics.lr.values()])
    assert rates == [[1e-2, 5e-3]] * 2 + [[5e-3, 2.5e-3]] * 2
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 5e-3], "the script's own are not changed"


def test_eval_is_in_eval_mode_on_the_current_state() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step = fp.prepare(
        module, optimizer, loss=lambda model, x: model(x).mean(), mesh=Mesh(data=2), plan=fp.zero(3, "data"), seed=0
    )
    evaluate, x = step.eval(lambda model, x: model(x)), torch.ones(4, 4)
    for _ in range(2):
        step(x)
        assert torch.allclose(evaluate(x), step.module()[0](x), atol=1e-6)
    assert module.training and module[1].training


def refused(error: type[Exception], match: str, **parts: Any) -> None:
    module = parts.pop("module", None) or net()
    optimizer = parts.pop("optimizer", two_groups)(module)
    scheduler = parts.pop("scheduler", lambda optimizer: None)(optimizer)
    with pytest.raises(error, match=match):
        fp.prepare(module, optimizer, scheduler, loss=loss, mesh=Mesh(), **parts)


class Mine(torch.optim.AdamW):
    pass


def stepped(module: Net) -> torch.optim.Optimizer:
    optimizer = two_groups(module)
    loss(module, *batches(1)[0]).backward()
    optimizer.step()
    return optimizer


def hooked(module: Net) -> torch.optim.Optimizer:
    optimizer = two_groups(module)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def test_what_cannot_be_translated_is_refused() -> None:
    refused(TypeError, r"cannot translate .*Mine.*AdamW, Adam, SGD", optimizer=lambda m: Mine(m.parameters()))
    refused(TypeError, "RMSprop", optimizer=lambda m: torch.optim.RMSprop(m.parameters()))
    refused(ValueError, r"group 0 of AdamW has amsgrad=True", optimizer=lambda m: two_groups(m, amsgrad=True))
    refused(ValueError, "maximize=True", optimizer=lambda m: two_groups(m, torch.optim.SGD, maximize=True))
    refused(ValueError, r"parameter of shape \(5, 6\) that is not one of Net", optimizer=lambda m: two_groups(net()))
    refused(ValueError, "has made steps", optimizer=stepped)
    refused(ValueError, "step hooks", optimizer=hooked)
    refused(ValueError, "reads the loss", scheduler=lr_scheduler.ReduceLROnPlateau)
    refused(TypeError, "not function", scheduler=lambda _: test_what_cannot_be_translated_is_refused)
    refused(ValueError, "another optimizer", scheduler=lambda _: SCHEDULERS["cosine"](two_groups(net())))
    refused(ValueError, "scheduler_every=0", scheduler=SCHEDULERS["cosine"], scheduler_every=0)

    class Decays(lr_scheduler.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            self.optimizer.param_groups[0]["weight_decay"] *= 0.5

    refused(ValueError, "Decays changes more than the learning rate", scheduler=lambda o: Decays(o, lambda n: 1.0))
    own = dict(optimizer=lambda _: fp.optim.adamw(1e-3))
    refused(TypeError, "leave out the scheduler", scheduler=lambda _: SCHEDULERS["cosine"](two_groups(net())), **own)
    refused(ValueError, r"statistics='global'\): it is 'rank', as in torch, or 'all'", statistics="global", **own)


def losses_on_processes(rank: int) -> list[float]:
    module = net()
    optimizer = two_groups(module)
    scheduler = SCHEDULERS["lambda"](optimizer)
    step = fp.prepare(module, optimizer, scheduler, loss=loss, mesh=Mesh(data=2), plan=fp.zero(2, "data"), clip=0.5)
    return [step(*batch).item() for batch in batches()]


def test_processes_train_as_one_device() -> None:
    reference = net()
    optimizer = two_groups(reference)
    want = by_torch(reference, optimizer, SCHEDULERS["lambda"](optimizer), clip=0.5)
    for found in run_on_processes(losses_on_processes, 2):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


LOOP, PREPARED = ROOT / "examples" / "ddp_loop.py", ROOT / "examples" / "prepared_loop.py"


def printed_losses(script: Path) -> list[float]:
    return [float(line.split()[1]) for line in printed(script)]


def test_a_ported_script_has_the_losses_of_the_original() -> None:
    assert len(LOOP.read_text().splitlines()) >= 60 and changed_lines(LOOP, PREPARED) <= 12
    microbatches = printed_losses(LOOP)  # one per microbatch, divided by their number
    losses = [sum(pair) for pair in zip(microbatches[::2], microbatches[1::2], strict=True)]
    torch.testing.assert_close(printed_losses(PREPARED), losses, rtol=1e-5, atol=1e-6)
