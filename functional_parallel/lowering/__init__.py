"""Lower a function on shards to a program: trace, type, check, split into microbatches and run the passes."""

from .leftovers import traced_in
from .lower import UNCHECKED, ArgumentPaths, Lowered, lower, lower_uncut, per_argument
