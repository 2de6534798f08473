"""Parallelism as function transforms: each takes a function and one mesh axis, and returns a function on shards."""

from ..requests import LossScale
from .accumulate import accumulate
from .argument_specs import matched
from .compress import compress
from .from_specs import from_specs
from .local_sgd import diloco, local_sgd
from .offload import offload
from .parallel import data_parallel, tensor_parallel, zero
from .partition_activations import partition_activations
from .pipeline import pipeline, stage_boundary
from .precision import mixed_precision
from .remat import recompute, remat
from .transform import Plan, Transform, chain
