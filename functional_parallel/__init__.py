"""Distributed training in PyTorch as function transforms.

A model is a pure function. A sharding spec is data. Every form of parallelism is a function transform. The result is a
program that shows all its collectives.
"""

from contextlib import suppress as _suppress

from sharding_specs import keep_as_leaves as _keep_as_leaves

from . import asynchronous, checkpoint, errors, interop, optim, random, schedules, testing
from .collectives import (
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
from .data import Position, Sampler, even_batches, pad_batch, pad_to
from .errors import (
    ArgumentSpecError,
    BackendError,
    BudgetError,
    CallMismatchError,
    CollectiveError,
    CollectiveTypeError,
    DonatedStateError,
    EqualCopiesWarning,
    LaunchError,
    LayoutError,
    LossScaleError,
    NonFiniteError,
    NothingToTrainError,
    NotTrainedWarning,
    OrderError,
    OutSpecError,
    PartitionError,
    PartitionWarning,
    TypingError,
    UnboundAxisError,
    UnevenBatchError,
)
from .functions import LocalFunction, functional, grad, grad_and_value, hessian, jvp, relayout, vmap
from .generation import Generated, Generator, generate
from .interop import PreparedStep, deepspeed, load_pretrained, prepare, save_pretrained
from .ir import abstract
from .ops import constrain, outputs
from .ops import keyed_draws as _keyed_draws  # its import registers them
from .partitioner import partition
from .planning import PipelineChoice, PipelineChoices, activation_bytes, estimate, layer_costs, search_pipeline
from .program import Hardware, Line, Price, Program
from .rules import register_rule
from .runtime import is_main_rank, launch, rank
from .stateful import Sharded
from .tracing import repeated
from .training import Metrics, TrainState, train_step
from .transforms import (
    LossScale,
    Plan,
    Transform,
    accumulate,
    chain,
    data_parallel,
    diloco,
    from_specs,
    local_sgd,
    mixed_precision,
    pipeline,
    recompute,
    remat,
    stage_boundary,
    tensor_parallel,
    zero,
)

with _suppress(ModuleNotFoundError):  # gloo works without it
    from . import shared_memory as _shared_memory  # its import registers it

_keep_as_leaves(__name__)

__all__ = [
    "ArgumentSpecError",
    "BackendError",
    "BudgetError",
    "CallMismatchError",
    "CollectiveError",
    "CollectiveTypeError",
    "Compiled",
    "DonatedStateError",
    "EqualCopiesWarning",
    "Generated",
    "Generator",
    "Hardware",
    "LaunchError",
    "LayoutError",
    "Line",
    "LocalFunction",
    "LossScale",
    "LossScaleError",
    "Metrics",
    "NonFiniteError",
    "NotTrainedWarning",
    "NothingToTrainError",
    "OrderError",
    "OutSpecError",
    "PartitionError",
    "PartitionWarning",
    "PipelineChoice",
    "PipelineChoices",
    "Plan",
    "Position",
    "PreparedStep",
    "Price",
    "Program",
    "Sampler",
    "Sharded",
    "TrainState",
    "Transform",
    "TypingError",
    "UnboundAxisError",
    "UnevenBatchError",
    "abstract",
    "accumulate",
    "all_gather",
    "all_to_all",
    "asynchronous",
    "axis_index",
    "axis_size",
    "broadcast",
    "chain",
    "checkpoint",
    "compile",
    "constrain",
    "data_parallel",
    "deepspeed",
    "diloco",
    "errors",
    "estimate",
    "even_batches",
    "from_specs",
    "functional",
    "gather",
    "generate",
    "grad",
    "grad_and_value",
    "hessian",
    "interop",
    "is_main_rank",
    "jvp",
    "launch",
    "layer_costs",
    "load_pretrained",
    "local_sgd",
    "mixed_precision",
    "optim",
    "outputs",
    "pad_batch",
    "pad_to",
    "partition",
    "pbroadcast",
    "pcast",
    "pipeline",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "prepare",
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
    "relayout",
    "remat",
    "repeated",
    "save_pretrained",
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
