"""Typed primitives. Each is a `torch.autograd.Function` around one library op; `functions` builds it.

All primitives except `pmax` and `pmin` are linear. A jvp is therefore the primitive on the tangent, and a backward is
another primitive on the cotangent, which `transposes` lists. Both call `apply_primitive`, never a raw op, so that
higher derivatives work.
"""

from . import transposes
from .emit import apply_primitive, axis_index, gradients_at_call, keeping_grad_mode
