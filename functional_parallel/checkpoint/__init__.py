"""Checkpoints: sharded, atomic, verified, without pickle, and restored onto any mesh and plan."""

from .folder import candidates as candidates
from .foreign import consolidate, load
from .layouts import LeafLayout, Piece, Vector
from .opened import Checkpoint, LeafInfo
from .peers import Peers as Peers
from .plan import SavePlan, plan_restore, plan_save
from .positions import load_position as load_position
from .positions import position_to_json as position_to_json
from .saver import Saver, inspect
from .saving import Contents as Contents
from .saving import Save as Save
from .saving import begin_save as begin_save
from .trees import tree_from_json as tree_from_json
from .trees import tree_keys as tree_keys
from .trees import tree_to_json as tree_to_json

__all__ = [
    "Checkpoint",
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
