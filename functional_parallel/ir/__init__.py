"""What a trace yields: the graph, each op's source line and stand-in, its text, and rewrites that every graph takes."""

from . import source
from .aval import Aval, aval_of, hollow, without_memory
from .checksum import checksum, glance
from .emit import casts_are_explicit, emit_node, explicit_casts, grad_mode_of
from .graph import (
    Traced,
    argument,
    forget_rewrites,
    getitem,
    in_order,
    named_arguments,
    operands_of,
    primitive_name,
    source_of,
    tensor_operands,
    walk_args,
    where,
)
from .info import NodeInfo, forget_info, info, set_info, update_info
from .simplify import forget_values, simplify
from .source import Source, current_source, inherit, is_library, raising_source, region, stages, warn_at
from .stand_ins import differentiable, stand_in
from .text import canonical_lines, first_difference, program_text
from .trained import as_complex, as_real, is_trained
from .variation import Axes, axes_of_nodes, varied_axes

__all__ = [
    "Aval",
    "Axes",
    "NodeInfo",
    "Source",
    "Traced",
    "argument",
    "as_complex",
    "as_real",
    "aval_of",
    "axes_of_nodes",
    "canonical_lines",
    "casts_are_explicit",
    "checksum",
    "current_source",
    "differentiable",
    "emit_node",
    "explicit_casts",
    "first_difference",
    "forget_info",
    "forget_rewrites",
    "forget_values",
    "getitem",
    "glance",
    "grad_mode_of",
    "hollow",
    "in_order",
    "info",
    "inherit",
    "is_library",
    "is_trained",
    "named_arguments",
    "operands_of",
    "primitive_name",
    "program_text",
    "raising_source",
    "region",
    "set_info",
    "simplify",
    "source",
    "source_of",
    "stages",
    "stand_in",
    "tensor_operands",
    "update_info",
    "varied_axes",
    "walk_args",
    "warn_at",
    "where",
    "without_memory",
]
