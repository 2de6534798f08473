"""Values written into the parameters of a prepared module are found, by any alias and in any memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import functional_parallel as fp
from functional_parallel import _torch
from functional_parallel.interop.module_writes import Writes
from functional_parallel.optim.optimizer import learning_rate
from sharding_specs import Mesh

from ..processes import run_on_processes

MEMORY: dict[str, Callable[[], nn.Parameter]] = {
    "of torch": lambda: nn.Parameter(torch.rand(2, 3)),
    "of NumPy": lambda: nn.Parameter(torch.from_numpy(np.ones((2, 3), np.float32))),
    "shared": lambda: nn.Parameter(torch.rand(2, 3).share_memory_()),
    "a view": lambda: nn.Parameter(torch.rand(4, 3)[1:3]),
}


@pytest.mark.parametrize("memory", MEMORY)
def test_writes_are_found_once(memory: str) -> None:
    p = MEMORY[memory]()
    watched = [Writes({"p": p}), Writes({"p": p})]
    writes: list[Callable[[], Any]] = [
        lambda: p.data.mul_(2),
        lambda: p.detach()[1].zero_(),
        lambda: p.detach().numpy().fill(3),
        lambda: nn.init.normal_(p),
        lambda: setattr(p, "data", torch.zeros(2, 3)),
    ]
    for write in writes:
        assert all(not each.found() for each in watched)
        write()
        for each in watched:
            assert each.found().keys() == {"p"}
            each.arm()
    p.data = p.data.double()
    assert watched[0].found()


@pytest.mark.parametrize("memory", MEMORY)
def test_reads_are_no_writes(memory: str) -> None:
    p = MEMORY[memory]()
    watched = Writes({"p": p})
    for read in (lambda: p.data_ptr(), lambda: p.detach().numpy(), lambda: p.share_memory_(), lambda: p.data.mul_(1)):
        read()
        assert not watched.found() and not watched.found()
    p.data[0, 0] += 1
    assert watched.found()


def prepared(net: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=options.pop("momentum", 0.0))
    return fp.prepare(net, optimizer, loss=lambda model, x: model(x).square().mean(), mesh=Mesh(data=2), **options)


def test_a_module_stays_in_its_memory_and_takes_no_more() -> None:
    net = nn.Linear(3, 1)
    outside = net.weight.detach().numpy()
    step = prepared(net, plan=fp.zero(3, "data"))
    address = _torch.address(net.weight)
    assert _torch.address(step._writes._clones["weight"]) == address
    step(torch.ones(4, 3))
    step.module()
    assert _torch.address(net.weight) == address and outside[0, 0] == net.weight[0, 0].item()


def test_writes_into_a_module_of_an_earlier_step_are_refused_once() -> None:
    net = nn.Linear(3, 1)
    step = prepared(net, plan=fp.data_parallel("data"))
    evaluate = step.eval(lambda model, x: model(x).sum())
    x = torch.ones(4, 3)
    step(x)
    net.weight.data.fill_(7)
    for call in (lambda x: step.module(), step, evaluate):
        with pytest.raises(
            fp.errors.SideEffectError, match=r"weight of Linear, .* not of step 1: call step\.module\(\)"
        ):
            call(x)
    assert not (step.module().weight == 7).any()
    with torch.no_grad():
        net.weight.fill_(7)
    assert evaluate(x).item() == pytest.approx(net(x).sum().item())
    assert (step.train.params(step.state)["weight"] == 7).all()
    step.state = step.train.load(*step.train.whole(step.state), step.state.step)
    net.weight.data.fill_(8)  # over the values of this state, though it is another one
    assert evaluate(x).item() == pytest.approx(net(x).sum().item())
    step(x)
    net.weight.data.fill_(9)
    with pytest.raises(fp.errors.SideEffectError, match="of an earlier step, not of step 2"):
        step(x)


def test_a_written_parameter_keeps_the_state_of_the_optimizer() -> None:
    net, other = nn.Linear(3, 1), nn.Linear(3, 1)
    other.load_state_dict(net.state_dict())
    optimizer = torch.optim.SGD(other.parameters(), 0.5, momentum=0.9)
    step = prepared(net, momentum=0.9, plan=fp.zero(2, "data"))
    for number in range(4):
        x = torch.randn(4, 3)
        step(x)
        optimizer.zero_grad()
        other(x).square().mean().backward()
        optimizer.step()
        for each in (step.module(), other):
            each.weight.data[:, number % 3] = 0
    torch.testing.assert_close(step.module().weight, other.weight)


def test_another_step_continues_after_a_refused_option() -> None:
    net, x = nn.Linear(3, 1), torch.ones(4, 3)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    parts = dict(loss=lambda model, x: model(x).square().mean(), mesh=Mesh(data=2), plan=fp.zero(1, "data"))
    step = fp.prepare(net, optimizer, **parts)
    step(x)
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    with pytest.raises(fp.errors.SideEffectError, match=r"\['betas'\] was \(0.9, 0.999\) and is \(0.5, 0.5\)"):
        step(x)
    new = fp.prepare(net, optimizer, **parts)
    new.state = new.train.load(*step.train.whole(step.state), step.state.step)
    new(x)
    assert new.state.step == 2 and torch.equal(new.module().weight, net.weight)


def test_rates_are_read_at_each_update_after_the_first_change() -> None:
    net, x = nn.Linear(3, 1), torch.ones(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5))
    step = fp.prepare(
        net, optimizer, loss=lambda model, x: model(x).mean(), mesh=Mesh(data=2), plan=fp.data_parallel("data")
    )
    rates, programs = [], []
    for rate in (0.5, 0.5, 0.25, 0.125, 0.5):
        optimizer.param_groups[0]["lr"].fill_(rate)
        step(x)
        (found,) = step.metrics.lr.values()
        rates.append(found.item())
        programs.append(step.train.program)
    assert rates == [0.5, 0.5, 0.25, 0.125, 0.5]
    assert programs[0] is programs[1] and programs[2] is programs[3] is programs[4] is not programs[0]


def on_processes(rank: int) -> list[float]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    step = prepared(net, plan=fp.zero(3, "data"))
    losses, x = [], torch.ones(4, 3)
    for number in range(4):
        losses.append(step(x).item())
        step.module().weight.data.mul_(2)
        step._habits._optimizer.param_groups[0]["lr"] = 0.5 / (number + 1)
    return losses


def test_processes_follow() -> None:
    want = on_processes(0)
    for found in run_on_processes(on_processes, 2):
        assert found == pytest.approx(want)


def test_a_rate_that_is_a_python_number_is_not_rounded_to_float32() -> None:
    rate = learning_rate(lambda updates: 0.1, torch.zeros(()))
    assert rate.dtype == torch.float64 and rate.item() == 0.1
