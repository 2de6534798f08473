"""Distributed training in PyTorch as function transforms.

A model is a pure function; a sharding spec is data; every form of parallelism is a function transform; the result is a
program whose every collective is visible.
"""

from sharding_specs import keep_as_leaves as _keep_as_leaves

from . import keyed_draws as _keyed_draws  # noqa: F401 - whose import registers them
from . import optim, random, schedules, testing
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
from .constrain import constrain
from .data import Position, Sampler, UnevenBatchError, even_batches, pad_batch
from .declared import ArgumentSpecError
from .derivatives import grad, grad_and_value, hessian, jvp, vmap
from .functional import functional
from .partition import PartitionError, PartitionWarning, partition
from .partition.rules import register_rule
from .precision import LossScale, LossScaleError, mixed_precision
from .program import BudgetError, Hardware, Line, Price, Program
from .runtime import BackendError, CollectiveError, OutOfStepError, is_main_rank, rank
from .search import PipelineChoice, PipelineChoices, layer_costs, search_pipeline
from .staging import LayoutError, OutSpecError
from .training import (
    DonatedStateError,
    Metrics,
    NonFiniteError,
    NothingToTrainError,
    NotTrainedWarning,
    TrainState,
    activation_bytes,
    estimate,
    train_step,
)
from .transforms import (
    OrderError,
    accumulate,
    chain,
    data_parallel,
    from_specs,
    pipeline,
    recompute,
    remat,
    stage_boundary,
    tensor_parallel,
    zero,
)
from .varying import TypingError

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
