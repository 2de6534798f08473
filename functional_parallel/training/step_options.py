"""The options of `train_step`, which are checked when it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from sharding_specs import Mesh

from .. import optim
from ..functions import LocalFunction, PyTree, as_local_function, require_function, require_mesh, written_here
from ..optim import Optimizer
from ..passes import Options
from ..quantities import is_positive
from ..requests import Buffers, Replicas
from .weight_versions import is_asynchronous

Plan = Callable[[Callable[..., Any]], Callable[..., Any]]

_NAMES = ("adafactor", "adagrad", "adam", "adamw", "lamb", "lion", "muon", "sgd")
_OPTIMIZERS = {name: getattr(optim, name) for name in _NAMES}


@dataclass(frozen=True)
class StepOptions(Options):
    """The options of a training step."""

    clip: float | None = None  # bound on the gradient's global norm
    seed: int | None = None  # of the key for random numbers; None if nothing is drawn
    has_aux: bool = False  # whether the loss returns `(scalar, aux)`
    batch: str = "global"  # each process passes the full batch, or with "own" its own shard
    nonfinite: str = "error"  # at a loss or gradient norm that is not finite, or "continue"

    def __post_init__(self) -> None:
        if self.batch not in ("global", "own"):
            raise ValueError(f"train_step(batch={self.batch!r}): it is 'global' or 'own'")
        if self.reduction not in ("fast", "ordered"):
            raise ValueError(
                f"train_step(reduction={self.reduction!r}): it is 'fast' or 'ordered', the order in which ranks are "
                "summed; whether gradients are of a sum or a mean, the loss says"
            )
        if self.nonfinite not in ("error", "continue"):
            raise ValueError(
                f"train_step(nonfinite={self.nonfinite!r}): it is 'error', to stop at a loss or gradient norm that is "
                "NaN or infinite, or 'continue'"
            )
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, Integral)):
            raise TypeError(f"train_step(seed={self.seed!r}): it is an integer, or None where nothing is drawn")
        if self.clip is not None and not is_positive(self.clip):
            raise ValueError(
                f"train_step(clip={self.clip!r}): the bound on the gradients' global norm is a number above 0, or None "
                "for none"
            )


def require_arguments(loss: Callable[..., Any], optimizer: Optimizer, mesh: Mesh, plan: Plan | None) -> None:
    """Check the arguments of `train_step` that are objects."""
    if not isinstance(loss, LocalFunction):
        require_function(loss, "train_step")
    require_mesh(mesh, "train_step")
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        instead = _instead_of_torchs(optimizer) or written_here(optimizer)
        raise TypeError(
            "train_step takes an optimizer from fp.optim, a pair of functions (init, update), "
            f"not {type(optimizer).__name__}" + (f": {instead}" if instead else "")
        )
    if plan is not None and not callable(plan):
        raise TypeError(f"train_step takes a plan, a transform or fp.chain of them, not {plan!r}")


def with_buffers(f: Callable[..., Any], buffers: dict[str, PyTree], mesh: Mesh) -> LocalFunction:
    """Return a loss that takes buffers after the parameters, with the request to keep them in the state."""
    local = as_local_function(f)
    if local.applied.last(Replicas) is not None or is_asynchronous(local.applied, mesh):
        raise ValueError(
            f"train_step(buffers=…): {local} has replicas or an asynchronous pipeline, and ranks would have other "
            "buffers; use fp.data_parallel, or a synchronous schedule"
        )
    return local.requesting(Buffers(buffers))


def _instead_of_torchs(optimizer: Any) -> str:
    """Return advice on the replacement of a torch optimizer or its class; empty for anything else."""
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        return ""
    bases = [base.__name__ for base in kind.__mro__]
    name = next((base.lower() for base in bases if base.lower() in _OPTIMIZERS), None)
    if "ZeroRedundancyOptimizer" in bases:
        write = "fp.optim.adamw(1e-3), with fp.zero(1, 'data') in the plan"
    elif name is None:
        write = f"one of {', '.join(_OPTIMIZERS)} of fp.optim, or fp.optim.Optimizer(init, update)"
    else:
        settings = "…" if optimizer is kind else _settings(_OPTIMIZERS[name], optimizer.param_groups[0])
        write = f"fp.optim.{name}({settings})"
    return f"torch.optim.{kind.__name__} changes tensors in place; write {write}"


def _settings(make: Callable[..., Any], group: dict[str, Any]) -> str:
    """Write the settings of a torch optimizer that differ from the defaults of ours."""
    settings = []
    for name, parameter in inspect.signature(make).parameters.items():
        value = group.get(name)
        value = value.item() if isinstance(value, torch.Tensor) else value
        if value is not None and (name == "lr" or value != parameter.default):
            settings.append(f"{name}={value!r}")
    return ", ".join(settings)
