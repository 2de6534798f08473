"""Distributed training in PyTorch as function transforms.

A model is a pure function. A sharding spec is data. Every form of parallelism is a function transform. The result is a
program that shows all its collectives.
"""

from sharding_specs import keep_as_leaves as _keep_as_leaves

from . import optim, random, schedules, testing
from .checker import ArgumentSpecError, TypingError
from .collectives import (
    CollectiveTypeError,
    UnboundAxisError,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    gather,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
    pvary,
    recv,
    reduce,
    scatter,
    send,
)
from .compile import Compiled, compile, shard_map
from .data import Position, Sampler, UnevenBatchError, even_batches, pad_batch
from .functions import functional, grad, grad_and_value, hessian, jvp, vmap
from .lowering import LayoutError, OutSpecError
from .ops import constrain
from .ops import keyed_draws as _keyed_draws  # noqa: F401 - whose import registers them
from .partition import PartitionError, PartitionWarning, partition
from .passes import BudgetError
from .planning import PipelineChoice, PipelineChoices, activation_bytes, estimate, layer_costs, search_pipeline
from .program import Hardware, Line, Price, Program
from .rules import register_rule
from .runtime import BackendError, CollectiveError, OutOfStepError, is_main_rank, rank
from .training import (
    DonatedStateError,
    Metrics,
    NonFiniteError,
    NothingToTrainError,
    NotTrainedWarning,
    TrainState,
    train_step,
)
from .transforms import (
    LossScale,
    LossScaleError,
    OrderError,
    accumulate,
    chain,
    data_parallel,
    from_specs,
    mixed_precision,
    pipeline,
    recompute,
    remat,
    stage_boundary,
    tensor_parallel,
    zero,
)

_keep_as_leaves(__name__)

__all__ = [
    "ArgumentSpecError",
    "BackendError",
    "BudgetError",
    "CollectiveError",
    "CollectiveTypeError",
    "Compiled",
    "DonatedStateError",
    "Hardware",
    "LayoutError",
    "Line",
    "LossScale",
    "LossScaleError",
    "Metrics",
    "NonFiniteError",
    "NotTrainedWarning",
    "NothingToTrainError",
    "OrderError",
    "OutOfStepError",
    "OutSpecError",
    "PartitionError",
    "PartitionWarning",
    "PipelineChoice",
    "PipelineChoices",
    "Position",
    "Price",
    "Program",
    "Sampler",
    "TrainState",
    "TypingError",
    "UnboundAxisError",
    "UnevenBatchError",
    "accumulate",
    "activation_bytes",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "chain",
    "compile",
    "constrain",
    "data_parallel",
    "estimate",
    "even_batches",
    "from_specs",
    "functional",
    "gather",
    "grad",
    "grad_and_value",
    "hessian",
    "is_main_rank",
    "jvp",
    "layer_costs",
    "mixed_precision",
    "optim",
    "pad_batch",
    "partition",
    "pbroadcast",
    "pcast",
    "pipeline",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pscatter",
    "psum",
    "psum_scatter",
    "pvary",
    "random",
    "rank",
    "recompute",
    "recv",
    "reduce",
    "register_rule",
    "remat",
    "scatter",
    "schedules",
    "search_pipeline",
    "send",
    "shard_map",
    "stage_boundary",
    "tensor_parallel",
    "testing",
    "train_step",
    "vmap",
    "zero",
]
