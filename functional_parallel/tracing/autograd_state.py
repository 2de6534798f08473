"""Changes of a tensor's autograd state in a trace, which has only values: hooks, `.grad`, `.data`, `requires_grad`.

They are refused where they would be lost. Where a traced function takes a derivative by torch's autograd, they work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import SideEffectError
from ..ir import current_source
from .interception import intercept

_Tensor: Any = torch.Tensor
_HOOK = "write its effect as a function of values, for a factor k of the gradient as k * x + ((1 - k) * x).detach()"
_LOST: dict[Callable[..., Any], tuple[str, str]] = {  # function → name, and its replacement
    _Tensor.register_hook: ("register_hook", _HOOK),
    _Tensor.register_post_accumulate_grad_hook: ("register_post_accumulate_grad_hook", _HOOK),
    _Tensor.retain_grad: ("retain_grad", "compute the gradient of a value by fp.grad, with the value as an argument"),
    _Tensor.detach_: ("detach_", "write x = x.detach()"),
    _Tensor.requires_grad_: ("requires_grad_(False)", "write x = x.detach()"),
    _Tensor.requires_grad.__set__: ("requires_grad = False", "write x = x.detach()"),
    _Tensor.grad.__set__: ("grad = …", "add a term to the loss, as (x * grad.detach()).sum()"),
    _Tensor.data.__set__: ("data = …", "write x = x + (value - x).detach(), which keeps the gradient"),
}
_FLAGS = {_Tensor.requires_grad_, _Tensor.requires_grad.__set__}


def _refusal(function: Callable[..., Any]) -> Callable[..., Any]:
    name, instead = _LOST[function]

    def refuse(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_on = function in _FLAGS and all((*args, *kwargs.values()))
        if not x.requires_grad and not is_on:
            raise SideEffectError(
                f"{current_source()}: {name} of a tensor of shape {tuple(x.shape)} changes the state of torch's "
                f"autograd, but a program has a separate backward: {instead}"
            )
        return NotImplemented

    return refuse


for _function in _LOST:
    intercept(_function, always=True, same_strides=True)(_refusal(_function))
