"""Table of sharding rules with one entry per aten op. The import of a module registers its rules.

A rule is text. It contains code only if the notation cannot express it.
"""

from . import factories, gradients, linear_algebra, lookups, losses, norms, pointwise, reductions, shapes, vision
