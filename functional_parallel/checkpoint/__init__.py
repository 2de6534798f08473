"""Checkpoints: sharded, atomic, verified, without pickle, and restored onto any mesh and plan."""

from .folder import TOO_FAST, TRIES, candidates, newest
from .foreign import consolidate, load
from .layouts import LeafLayout, Piece, Vector
from .moves import Move, MovePlan
from .opened import Checkpoint, LeafInfo
from .peers import Peers
from .plan import SavePlan, plan_restore, plan_save
from .positions import load_position, position_to_json
from .saver import Saver, inspect
from .saving import Contents, Copies, Save, begin_save, require_only
from .trees import tree_from_json, tree_keys, tree_to_json

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
