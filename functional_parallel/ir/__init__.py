"""Result of a trace: the graph, source lines, differentiable forms of ops, its text, and passes for every graph."""

from . import source
from .abstract import abstract, is_abstract, refuse_abstract, without_values
from .aval import OPS_ON_SHAPES, Aval, aval_of, hollow, in_main_memory, scalar_beside, without_memory
from .bodies import Copy, copies_of, repeats_are_shared, without_repeats
from .checksums import checksum, memory_of, sample_hash
from .eval_node import casts_are_explicit, eval_node, explicit_casts, grad_mode_of
from .graph import (
    Args,
    Kwargs,
    Traced,
    argument,
    change_call,
    collective_call,
    first_operand,
    forget_rewrites,
    getitem,
    implied_source,
    named_arguments,
    operands_of,
    primitive_name,
    reached,
    source_of,
    tensor_operands,
    the_call,
    topological_order,
    walk_args,
    where,
)
from .info import NodeInfo, Role, forget_info, info, set_info, update_info
from .out_of_place import declares_writes, out_of_place, write_by_copies
from .recorded import before_launches, is_recording, recording
from .repeats import crossing_values, cuts_between_repeats
from .residuals import forward_nodes, residuals
from .signature import LeafSignature, TensorSignature, leaf_signature
from .simplify import forget_values, frozen, simplify
from .source import (
    Source,
    at_source,
    count_stage_boundaries,
    current_source,
    is_library,
    raising_source,
    recompute_region,
    warn_at,
)
from .stamping import Rename, Template, has_slices_of, slices_of
from .stand_ins import define_op, differentiable_form, origin_of, register_differentiable
from .text import canonical_lines, first_difference, program_text
from .tracebacks import with_short_tracebacks
from .trained import as_complex, as_real, is_trained
from .variation import AxisSet, axes_of_nodes, varied_axes
from .views import REARRANGEMENTS, RESHAPES, UNIT_DIMS, VIEWS, viewed_argument
