"""Checkpoints: sharded, atomic, verified, without pickle, and restored onto any mesh and plan."""

from .disk import Disk
from .files import ShardFile
from .folder import TOO_FAST, TRIES, candidates, newest
from .format import Entry, header, without_repeats
from .layouts import LeafLayout, Piece, Vector
from .leaf_names import tree_from_json, tree_keys, tree_to_json
from .loader_positions import load_position, position_to_json
from .moves import Move, MovePlan
from .opened import Checkpoint, LeafInfo, fill_shards
from .other_formats import consolidate, load
from .peers import Peers
from .plan import ReadItem, SavePlan, plan_restore, plan_save
from .saver import Saver, inspect
from .saving import Contents, Copies, Save, begin_save, require_only

__all__ = [
    "Checkpoint",
    "Copies",
    "LeafInfo",
    "LeafLayout",
    "Piece",
    "SavePlan",
    "Saver",
    "Vector",
    "consolidate",
    "inspect",
    "load",
    "plan_restore",
    "plan_save",
]
