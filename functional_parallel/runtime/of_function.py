"""Runtime of a function's programs, by the transforms in its layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sharding_specs import Mesh

from ..errors import PipelineError
from ..functions import LocalFunction, PyTree, layout_of
from ..pipelines import pipeline_of
from .default import default_runtime
from .interface import Runtime
from .pipelined import PipelineRuntime

__all__ = ["refuse_asynchronous", "runtime_of"]


def refuse_asynchronous(f: LocalFunction, mesh: Mesh) -> None:
    """Reject a pipeline that updates weights between microbatches, because it supports only training steps."""
    plan = pipeline_of(f.layout)
    if plan is not None and plan.on(mesh).versions is not None:
        raise PipelineError(
            f"{plan.on(mesh).name} updates weights while microbatches are under way: train with it by fp.train_step; "
            "for a gradient, or to evaluate, take a synchronous schedule, such as '1f1b'"
        )


def runtime_of(mesh: Mesh, f: Callable[..., PyTree], reduction: str = "fast") -> Runtime[Any, Any]:
    """Return the runtime of a function's programs: the runtime of the mesh, wrapped by that of the pipeline if any."""
    base = default_runtime(mesh, reduction)
    plan = pipeline_of(layout_of(f))
    return base if plan is None else PipelineRuntime(base, plan.axis)
