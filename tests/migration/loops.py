"""The same training loop twice, for habits between its steps: as a loop of torch, and with `fp.prepare`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import functional_parallel as fp
from sharding_specs import Mesh

__all__ = ["Eager", "Loop", "Net", "Prepared", "batch", "loss_of", "optimizers"]


class Net(nn.Module):
    """Linear layers with a mode, attributes, buffers and a frozen parameter that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.second = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), 0.5))
        self.scale, self.factors = 1.0, [1.0, 2.0]
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.first(x)) * self.scale * self.gain + self.shift
        return self.second(h if self.training else 0.5 * h) * self.factors[0]


def loss_of(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (model(x) - 1).square().mean()


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


optimizers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), 0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), 0.01),
}


class Loop(ABC):
    """A loop with its objects. `before` changes them before the first step."""

    def __init__(
        self,
        optimizer: str = "sgd",
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        before: Callable[[Any], None] | None = None,
    ) -> None:
        self.net = Net()
        self.optimizer = optimizers[optimizer](self.net)
        self.scheduler = None if schedule is None else schedule(self.optimizer)
        self.kept: dict[str, Any] = {}  # by a habit
        if before is not None:
            before(self)
        self.begin()

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Train on a batch. Return the loss."""

    @abstractmethod
    def current(self) -> nn.Module:
        """Return the module with the current parameters."""

    @abstractmethod
    def evaluate(self, x: torch.Tensor) -> torch.Tensor: ...

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: each.detach().clone() for name, each in self.current().named_parameters()}


class Eager(Loop):
    def begin(self) -> None:
        pass

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = loss_of(self.net, x)
        loss.backward()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.detach()

    def current(self) -> nn.Module:
        return self.net

    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        modes = {each: each.training for each in self.net.modules()}
        with torch.no_grad():
            found = loss_of(self.net.eval(), x)
        for each, mode in modes.items():
            each.training = mode
        return found


class Prepared(Loop):
    plan: Any = staticmethod(fp.data_parallel("data"))

    def begin(self) -> None:
        parts = self.net, self.optimizer, self.scheduler
        self.prepared = fp.prepare(*parts, loss=loss_of, mesh=Mesh(data=2), plan=self.plan)
        self._evaluate = self.prepared.eval(loss_of)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.prepared(x)

    def current(self) -> nn.Module:
        return self.prepared.module()

    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        return self._evaluate(x)
