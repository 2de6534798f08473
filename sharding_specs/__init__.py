"""Meshes, sharding specs, rules that match specs to paths, and conversion between layouts, without computation."""

from .annotate import annotate, split
from .boxes import Box, boxes_of_run, holders, rank_boxes
from .dataclass_nodes import keep_as_leaves, register_dataclasses
from .errors import Error, MeshError, SpecError
from .layout import local_shape, padded_shape, reshard, shard, shard_leaf, unshard, unshard_leaf, whole_shape
from .memory_table import MemoryRow, bytes_per_rank, memory_table
from .mesh import Mesh
from .rules import RuleMatch, apply_rules, match_rules, optional
from .spec import P, Placement, as_spec
from .storage import register_storage
from .trees import broadcast_specs, tree_paths
from .validate import require_dims, validate

__all__ = [
    "Box",
    "Error",
    "MemoryRow",
    "Mesh",
    "MeshError",
    "P",
    "Placement",
    "RuleMatch",
    "SpecError",
    "annotate",
    "apply_rules",
    "as_spec",
    "boxes_of_run",
    "broadcast_specs",
    "bytes_per_rank",
    "holders",
    "keep_as_leaves",
    "local_shape",
    "match_rules",
    "memory_table",
    "optional",
    "padded_shape",
    "rank_boxes",
    "register_dataclasses",
    "register_storage",
    "require_dims",
    "reshard",
    "shard",
    "shard_leaf",
    "split",
    "tree_paths",
    "unshard",
    "unshard_leaf",
    "validate",
    "whole_shape",
]
