"""Typed primitives. Each is a `torch.autograd.Function` around one library op; `functions` builds it.

Backwards and jvps call `apply_primitive`, never a raw op, so that higher derivatives work.
"""

from . import transposes
from .emit import apply_primitive, axis_index, gradients_at_call, keeping_grad_mode
