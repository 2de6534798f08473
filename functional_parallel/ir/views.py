"""View ops by their effect on elements. Every list of view ops in the library is composed of these.

An op is listed by its effect on values, not by its memory: `reshape` and `_unsafe_view` share memory or do not. What
shares memory for certain follows from the schema of an op.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.fx.node import Target

aten = torch.ops.aten

#: another shape, given as argument 1; the elements keep their order
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default}

#: a dim of size one more or less; the elements keep their order
UNIT_DIMS = {aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}

#: every element once, in any order
REARRANGEMENTS = RESHAPES | UNIT_DIMS | {aten.permute.default, aten.t.default, aten.transpose.int}

#: elements of the operand, each any number of times
VIEWS = REARRANGEMENTS | {
    *(aten.alias.default, aten.detach.default, aten.expand.default, aten.select.int, aten.slice.Tensor)
}


@cache
def viewed_argument(op: Target) -> int | None:
    """Return the position of the argument that shares memory with the results of an op by its schema, or None."""
    schema = getattr(op, "_schema", None)
    if schema is None or all(result.alias_info is None for result in schema.returns):
        return None
    aliased = [each.alias_info for each in schema.arguments]
    return next((at for at, alias in enumerate(aliased) if alias is not None and not alias.is_write), None)
