"""All private torch APIs that the library uses. `tests/private_torch` fails if torch moves one of them."""

from .autograd_graph import sources_of_gradients
from .backends import compile_by_inductor, fused_adamw_, has_fused_adamw, store_of_all_ranks, timeout_of_all_ranks
from .checkpointing import checkpointing
from .fake_results import FakeResults
from .fakes import (
    DATA_DEPENDENT_ERRORS,
    FakeTensor,
    StorageWeakRef,
    added_attributes,
    forget_fakes,
    forget_names,
    forgetting_shapes,
    is_all_true,
    reads_no_memory,
    unlogged_fakes,
    without_constant,
)
from .functions import FunctionContext, InDims, VmapInfo, quick_apply, running_functions, without_zeros
from .hooks import flags_of_parameter, forward_hooks, gradient_hooks, has_step_hooks
from .initialisers import default_generator, redrawing_initialiser
from .nodes import add_call
from .ops import (
    HigherOrderOp,
    Op,
    OpPacket,
    as_composed,
    decomposition_of,
    direct_call,
    functional_variant,
    grouped_mm,
    has_derivative,
    is_composite,
    norms,
    one_by_one,
    stride_free,
    under_transforms,
)
from .stand_in import FakeTensorMode, device_for_trace, is_missing, wished_device
from .threads import Replacement, of_thread, pushed
from .transforms import (
    TorchDispatchMode,
    backward_node_number,
    backward_number,
    counting_levels,
    differentiating_level,
    disable_functorch,
    disable_modes,
    disable_torch_function,
    dispatch_modes,
    function_modes,
    fused_backwards,
    gradient_level,
    has_functorch_level,
    is_above_autograd,
    is_functorch_wrapped,
    is_inside_transform,
    mapped_dims,
    needs_higher_derivatives,
    next_node_number,
    takes_one_gradient,
    unwrap,
)
from .writes import address, lazy_clone
