"""A program: a flat graph of aten ops and named collectives, with the mesh it is for; typed, printable, countable."""

from .base import BaseProgram
from .collectives import COMMUNICATING, Collective, bytes_of, collectives_of, counts_of, keep_phases
from .explain import Explanation, columns, parse_bytes, readable_bytes
from .hardware import HARDWARE, Hardware, hardware_of
from .links import Line
from .memory import KINDS, Ledger, Memory, Storage, draw, memory_of, said_shared
from .overlap import STARTED, one_scatter_at_a_time, overlapped
from .price import Item, Price, price_of
from .program import Program
from .rewrites import UNCUT, Intermediate
from .shared_memory import channel_bytes, shared_by_collectives
from .sharing import (
    aliases_of,
    is_only_use_of_own_memory,
    may_stay_in_place,
    readers_before_writes,
    root_of,
    shares_memory,
    viewed,
    written_by,
)
from .work import flops, work

__all__ = [
    "COMMUNICATING",
    "HARDWARE",
    "KINDS",
    "STARTED",
    "UNCUT",
    "BaseProgram",
    "Collective",
    "Explanation",
    "Hardware",
    "Intermediate",
    "Item",
    "Ledger",
    "Line",
    "Memory",
    "Price",
    "Program",
    "Storage",
    "aliases_of",
    "bytes_of",
    "channel_bytes",
    "collectives_of",
    "columns",
    "counts_of",
    "draw",
    "flops",
    "hardware_of",
    "is_only_use_of_own_memory",
    "keep_phases",
    "may_stay_in_place",
    "memory_of",
    "one_scatter_at_a_time",
    "overlapped",
    "parse_bytes",
    "price_of",
    "readable_bytes",
    "readers_before_writes",
    "root_of",
    "said_shared",
    "shared_by_collectives",
    "shares_memory",
    "viewed",
    "work",
    "written_by",
]
