"""Parallelism as function transforms: each takes a function and one mesh axis, and returns a function on shards."""

from ..requests import LossScale
from .accumulate import accumulate
from .from_specs import from_specs
from .local_sgd import diloco, local_sgd
from .parallel import data_parallel, matched, tensor_parallel, zero
from .pipeline import pipeline, stage_boundary
from .precision import mixed_precision
from .remat import recompute, remat
from .transform import Plan, Transform, chain

__all__ = [
    "LossScale",
    "Plan",
    "Transform",
    "accumulate",
    "chain",
    "data_parallel",
    "diloco",
    "from_specs",
    "local_sgd",
    "matched",
    "mixed_precision",
    "pipeline",
    "recompute",
    "remat",
    "stage_boundary",
    "tensor_parallel",
    "zero",
]
