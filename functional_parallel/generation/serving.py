"""The plan of a training step as the plan of generation: parameters are gathered once, not for every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree

from sharding_specs import Mesh, P

from ..functions import LocalFunction, PyTree, SpecTree, as_local_function
from ..requests import Order, StoredType
from ..stateful import Sharded
from ..transforms import (
    Transform,
    chain,
    data_parallel,
    local_sgd,
    mixed_precision,
    pipeline,
    remat,
    tensor_parallel,
    zero,
)


def serving_plan(plan: Any, state: SpecTree = None, *, arguments: int = 1) -> Callable[..., LocalFunction]:
    """Return the plan for functions of params, a cache and a batch.

    ZeRO shards nothing without an optimizer, and remat, accumulation and gradients have no effect. Specs of the
    arguments of the loss are left out.

    Args:
        plan: the plan of the training step, a transform, or None.
        state: specs of the cache; None for a function that makes it.
        arguments: number of arguments after the parameters. The cache is the first of them.

    Raises:
        ValueError: if the plan has a transform under which ranks hold different parameters.
    """
    kept = [_served(each, state, arguments) for each in ([] if plan is None else plan.transforms)]
    served = chain(*(each for each in kept if each is not None))
    return lambda f: as_local_function(served(f))


def stored_by(plan: Any, params: PyTree) -> PyTree:
    """Return parameters in the dtypes of a plan with mixed precision, so that no step casts them."""
    stored = serving_plan(plan)(lambda params: params).applied.last(StoredType)
    if stored is None:
        return params
    return params.cast(stored.stored(params.shapes)) if isinstance(params, Sharded) else stored.stored(params)


def without_single_ranks(plan: Any, mesh: Mesh) -> Any:
    """Return a plan without data axes of one rank, where a batch of one row would have no separate spec."""
    if not data_axes(plan):
        return plan
    single = {axis for axis in data_axes(plan) if mesh.axis_size(axis) == 1}
    rows = (zero, data_parallel)
    return chain(*(each for each in plan.transforms if not (isinstance(each, rows) and each.axis in single)))


def data_axes(plan: Any) -> tuple[str, ...]:
    """Return the axes that split the rows."""
    found = [] if plan is None else plan.transforms
    return tuple(each.axis for each in found if isinstance(each, (zero, data_parallel)))


def microbatches_of(plan: Any) -> int:
    """Return the number of microbatches of the plan's pipeline, 1 without one."""
    return next((each.microbatches for each in getattr(plan, "transforms", ()) if isinstance(each, pipeline)), 1)


def is_pipelined(plan: Any) -> bool:
    return any(isinstance(each, pipeline) for each in getattr(plan, "transforms", ()))


def _served(transform: Transform, state: SpecTree, arguments: int) -> Transform | None:
    if isinstance(transform, remat) or transform.order is Order.ACCUMULATE:
        return None
    if isinstance(transform, local_sgd) or getattr(transform, "master", None) is not None:
        raise ValueError(
            f"{transform.name} leaves ranks with different parameters; generate with a plan without it, from "
            "train.params(state)"
        )
    if isinstance(transform, mixed_precision):  # the cache has the dtypes that the model gives it
        return replace(transform, inputs="fp32", results=transform.compute)
    if isinstance(transform, tensor_parallel):
        return replace(transform, batch=_batch(state, transform.axis, P(), arguments))
    if isinstance(transform, (zero, data_parallel)):
        batch = _batch(state, transform.axis, P(transform.axis), arguments)
        return data_parallel(transform.axis, batch=batch, strict=transform.strict)
    if isinstance(transform, pipeline):  # all programs must have the same stages
        return replace(transform, batch=None, balance="layers")
    return transform


def _batch(state: SpecTree, axis: str, other: P, arguments: int) -> SpecTree:
    """Return specs of the arguments after the parameters along an axis."""
    if state is None:
        return None
    return (optree.tree_map(lambda spec: spec.only({axis}), state), *[other] * (arguments - 1))
