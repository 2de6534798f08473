"""Parallelism as function transforms: each takes a function and one mesh axis, and returns a function on shards."""

from .from_specs import from_specs
from .parallel import data_parallel, tensor_parallel, zero
from .transform import Order, OrderError, Plan, Transform, chain

__all__ = [
    "Order",
    "OrderError",
    "Plan",
    "Transform",
    "chain",
    "data_parallel",
    "from_specs",
    "tensor_parallel",
    "zero",
]
