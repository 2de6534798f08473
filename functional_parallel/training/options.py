"""What `train_step` was asked for: refused where it is written, before it is taken for something else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch

from .. import optim
from ..functions import LocalFunction, require_function, require_mesh, written_here
from ..quantities import is_limit

__all__ = ["require_options"]

_OPTIMIZERS = {name: getattr(optim, name) for name in ("adafactor", "adam", "adamw", "lion", "sgd")}


def require_options(
    loss: Any, optimizer: Any, mesh: Any, plan: Any, clip: Any, seed: Any, batch: Any, reduction: Any, nonfinite: Any
) -> None:
    """Refuse options of `train_step` that mean nothing.

    Args:
        loss, optimizer, mesh, plan, clip, seed, batch, reduction, nonfinite: as for `train_step`.

    Raises:
        ValueError, TypeError: for one that it does not take, naming what it does.
    """
    if not isinstance(loss, LocalFunction):
        require_function(loss, "train_step")
    require_mesh(mesh, "train_step")
    if batch not in ("global", "own"):
        raise ValueError(f"train_step(batch={batch!r}): it is 'global' or 'own'")
    if reduction not in ("fast", "ordered"):
        raise ValueError(
            f"train_step(reduction={reduction!r}): it is 'fast' or 'ordered', the order in which ranks are summed; "
            "whether gradients are of a sum or a mean, the loss says"
        )
    if nonfinite not in ("error", "continue"):
        raise ValueError(
            f"train_step(nonfinite={nonfinite!r}): it is 'error', to stop at a loss or gradient norm that is NaN or "
            "infinite, or 'continue'"
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral)):
        raise TypeError(f"train_step(seed={seed!r}): it is an integer, or None where nothing is drawn")
    if clip is not None and not is_limit(clip):
        raise ValueError(
            f"train_step(clip={clip!r}): the bound on the gradients' global norm is a number above 0, or None for none"
        )
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        instead = _instead_of_torchs(optimizer) or written_here(optimizer)
        raise TypeError(
            "train_step takes an optimizer from fp.optim, a pair of functions (init, update), "
            f"not {type(optimizer).__name__}" + (f": {instead}" if instead else "")
        )
    if plan is not None and not callable(plan):
        raise TypeError(f"train_step takes a plan, a transform or fp.chain of them, not {plan!r}")


def _instead_of_torchs(optimizer: Any) -> str:
    """Return what to write instead of a torch optimizer or its class; empty for anything else."""
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
