"""Measures of `rules.for_model` for a family: share, gathers, and the error against one device, per plan."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any, NamedTuple

import torch

import functional_parallel as fp
from sharding_specs import Mesh, apply_rules, rules

from .families import FAMILIES, Batch, Loss, loss_of, made

__all__ = ["PLANS", "Measured", "bound_of", "measured", "source_of"]

PLANS: dict[str, tuple[Mesh, Any]] = {
    "data": (Mesh(data=2, tensor=2), fp.data_parallel("data")),
    "zero": (Mesh(data=2, tensor=2), fp.zero(3, "data")),
    "pipe": (Mesh(pipe=2, tensor=2), fp.pipeline("pipe", schedule="1f1b", microbatches=2)),
    "pipe, 1 microbatch": (Mesh(pipe=2, tensor=2), fp.pipeline("pipe", schedule="1f1b", microbatches=1)),
}
_ROUNDING = 1e-12  # a gradient below it is rounding alone, as that of a bias of keys


class Measured(NamedTuple):
    share: float
    gathers: int
    error: float
    compared: int
    parameters: int


def bound_of(family: str) -> float:
    return 1e-5 if FAMILIES[family].experts else 1e-10


def source_of(family: str) -> str:
    return "`_tp_plan`" if getattr(_case(family, "grouped_mm")[0], "_tp_plan", None) else "table"


@cache
def _case(family: str, experts: str) -> tuple[torch.nn.Module, Loss, dict[str, torch.Tensor], Batch, Any]:
    model, batch = made(family, experts)
    loss, params = loss_of(model, not FAMILIES[family].experts)
    return model, loss, params, batch, fp.grad_and_value(loss)(params, batch)


def measured(family: str, kind: str) -> Measured:
    """Compare loss and gradients on a mesh with those of one device. The loss over a batch of CLIP is not streamed."""
    mesh, transform = PLANS["pipe, 1 microbatch" if (family, kind) == ("CLIP", "pipe") else kind]
    model, loss, params, batch, (wanted, expected) = _case(family, "batched_mm" if kind == "pipe" else "grouped_mm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rules.for_model(model, "tensor", mesh=mesh)
    specs = apply_rules(found, params, strict=True)
    plan = fp.chain(fp.tensor_parallel("tensor", found), transform)
    step = fp.compile(fp.grad_and_value(plan(loss)), mesh)
    grads, value = step(params, batch)
    sizes = {path: wanted[path].abs().max() for path in params}
    compared = [path for path in params if sizes[path] > _ROUNDING]
    errors = [float((grads[path] - wanted[path]).abs().max() / sizes[path]) for path in compared]
    gathers = [
        each
        for each in step.lower(params, batch).collectives()
        if each.kind in ("all_gather", "all_to_all") and "tensor" in each.axes
    ]
    return Measured(
        sum(params[path].numel() for path, spec in specs.items() if spec.axes)
        / sum(x.numel() for x in params.values()),
        len(gathers),
        max([*errors, float(abs(value - expected) / abs(expected))]),
        len(compared),
        len(params),
    )
