"""Programs of functions of values that stay on the ranks between calls, and these values."""

from .held import (
    Held,
    StaticLeaf,
    at_rest,
    copied,
    full_leaves,
    handle_of_shards,
    hollow_on,
    require_holders,
    tensors,
    tensors_of,
)
from .held_call import held_argument, new_state_of, require_same_state, run_held, steps_of
from .held_leaves import HeldLeaves, leaf_layout, owners_along, peers_of, saved_shapes
from .own_shards import brought, own_shards, with_rows
from .sharded import Sharded, filled
from .signatures import listed, on_one_line, structure_as_text
from .stateful_program import StatefulProgram
