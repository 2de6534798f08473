"""An optimizer's update of shards: where its leaves lie, what it may compute, and the flat vector."""

from .flat import require_elementwise
from .places import Places, find_places
from .replicated_state import warn_of_replicated_state
from .returned import require_alike
from .scaled import ScaledState, scaled_loss, unless, unscaled, with_scale
from .updating import at_rest, global_norm, into_compute, into_update, joined_again, likes, over_likes, split_further

__all__ = [
    "Places",
    "ScaledState",
    "at_rest",
    "find_places",
    "global_norm",
    "into_compute",
    "into_update",
    "joined_again",
    "likes",
    "over_likes",
    "require_alike",
    "require_elementwise",
    "scaled_loss",
    "split_further",
    "unless",
    "unscaled",
    "warn_of_replicated_state",
    "with_scale",
]
