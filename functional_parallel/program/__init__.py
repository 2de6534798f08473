"""A program: a flat, typed graph of aten ops and named collectives, with its mesh."""

from . import extra_memory
from .aliasing import (
    aliases_of,
    is_only_use_of_own_memory,
    may_stay_in_place,
    mutated_operands,
    readers_before_writes,
    shares_memory,
    storage_root,
    view_base,
)
from .base_program import BaseProgram
from .explain import Explanation, columns
from .extra_memory import ExtraMemory
from .hardware import HARDWARE, Hardware, Line, hardware_of
from .host import HostOp, require_capturable
from .memories import memories_of
from .memory import MEMORY_KINDS, MemoryUse, Storage, StorageTable, draw, kind_of_input, memory_of
from .memory_budget import WAYS_OUT, Memory
from .memory_moves import MemoryMove, bytes_of_moves, ended_before, may_outlast, moves_of, waits_of
from .overlap import is_started, one_scatter_at_a_time, overlapped
from .pass_table import PassTable, Watch
from .price import Price, price_of, readable_seconds, seconds_of
from .price_item import Item
from .program import Program, has_owner
from .purpose import RoleFinder
from .traffic import Collective, bytes_of, collectives_of, counts_of, keep_phases
from .work import flops, recompute_cost
