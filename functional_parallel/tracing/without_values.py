"""`F.one_hot` by comparison, wherever it is traced.

torch's own looks for the smallest and largest class, unless it can tell that its operand has no values; under a
torch.func transform, or for a constant that the function closes over, it cannot.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch
from .intercept import intercept

__all__: list[str] = []


@intercept(torch.nn.functional.one_hot, always=True)
def _one_hot(tensor: Any, num_classes: int = -1) -> Any:
    if tensor.dtype != torch.int64:  # torch says what is wrong
        return NotImplemented
    if not isinstance(tensor, _torch.FakeTensor) and not _torch.is_functorch_wrapped(tensor) and tensor.numel():
        with _torch.apart_from_modes():  # a constant: to check it and to count the classes its extremes are enough
            num_classes = torch.nn.functional.one_hot(torch.stack(tensor.aminmax()), num_classes).shape[-1]
    if num_classes < 1:
        return NotImplemented
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)
