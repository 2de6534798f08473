"""Refuse modules, optimizers and meshes of torch where this library needs its own, and show the code to write."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sharding_specs import Mesh

from ..collectives import check_callable
from .request import PyTree

_WRITE = "Write `model, params = fp.functional(module)` and `def loss(params, batch): …` that calls `model(params, …)`"
_SCHEDULERS = {
    "ConstantLR": "constant(rate)",
    "LinearLR": "linear(start, end, steps)",
    "CosineAnnealingLR": "cosine(rate, steps)",
    "ExponentialLR": "exponential(rate, factor)",
    "StepLR": "exponential(rate, factor, every=steps, stairs=True)",
    "OneCycleLR": "one_cycle(…)",
    "SequentialLR": "join(…)",
}


def require_function(f: Callable[..., PyTree], who: str) -> None:
    """Refuse a function of parameters that is a module with parameters, a DDP or FSDP module, or not callable."""
    if not callable(f):
        if isinstance(f, tuple) and len(f) in (2, 3) and callable(f[0]):
            raise TypeError(f"{who} takes a function of parameters, not a pair, as fp.functional returns. {_WRITE}")
        raise TypeError(f"{who} takes a function of parameters, not {type(f).__name__}. {_WRITE}")
    check_callable(f)
    names = [name for name, _ in f.named_parameters()] if isinstance(f, nn.Module) else []
    if names:
        raise TypeError(
            f"{who} takes a function of parameters, not the module {type(f).__name__}, which holds its {len(names)} "
            f"parameters, the first at {names[0]!r}. {_WRITE}"
        )


def require_module(module: nn.Module, who: str) -> None:
    if not isinstance(module, nn.Module):
        name = getattr(module, "__name__", "")
        kind = f"the function {name}" if callable(module) and name else type(module).__name__
        raise TypeError(f"{who} takes an nn.Module, not {kind}; a function of parameters needs no {who}")


def require_mesh(mesh: Mesh, who: str) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{who} takes a sharding_specs.Mesh, not {type(mesh).__name__}: write {_mesh_for(mesh)}")


def _mesh_for(mesh: Any) -> str:
    sizes = getattr(mesh, "shape", None)
    if type(mesh).__module__.startswith("torch.") and isinstance(sizes, tuple):
        names = getattr(mesh, "mesh_dim_names", None)
        pairs = zip(names or [f"axis{index}" for index in range(len(sizes))], sizes, strict=True)
        written = f"Mesh({', '.join(f'{name}={size}' for name, size in pairs)})"
        return written if names else f"{written}, with names of your own"
    if isinstance(mesh, dict):
        return f"Mesh({', '.join(f'{name}={size}' for name, size in mesh.items())})"
    if isinstance(mesh, str):
        return f"Mesh.parse({mesh!r})"
    if isinstance(mesh, int):
        return f"Mesh(data={mesh})"
    return "Mesh() for one rank, or Mesh(data=2)"


def written_here(value: Any) -> str:
    """Return what to write in place of a torch scheduler, or of a module's parameters; "" for any other value."""
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        schedule = _SCHEDULERS.get(kind.__name__)
        example = f"fp.optim.schedules.{schedule}" if schedule else "a function from the step to the rate"
        return f"torch's {kind.__name__} changes a torch optimizer; give {example} to the optimizer as its rate"
    if _are_parameters(value):
        return "an optimizer of fp.optim holds no parameters: train.init(params) takes them. Write fp.optim.adamw(1e-3)"
    return ""


def _are_parameters(value: Any) -> bool:
    if inspect.isgenerator(value):
        return True
    leaves = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(isinstance(leaf, (torch.Tensor, dict)) for leaf in leaves)
