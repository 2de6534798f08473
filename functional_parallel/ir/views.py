"""View ops by what they do to elements. Every list of view ops in the library is composed of these.

An op is listed by its effect on values, not by its memory: `reshape` and `_unsafe_view` share memory or do not.
`tracing.view_chains` decides by an op's schema what shares memory.
"""

from __future__ import annotations

import torch

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
