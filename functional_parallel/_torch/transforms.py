"""Active transforms and modes of torch, and tensors without their wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
import torch._functorch.eager_transforms
from torch._functorch.eager_transforms import _create_differentiable, grad_increment_nesting
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from .threads import Replacement, of_thread, pushed


@contextmanager
def disable_functorch() -> Iterator[None]:
    """Disable active dispatch modes and torch.func levels. Code inside sees plain tensors."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes(), pushed(_fused(), False):
        yield


def is_above_autograd() -> bool:
    """Whether autograd will still process the current op, although dispatch modes already see it."""
    # torch detaches in this way a result that a backward op saves, when it is saved and at each access. Such a result
    # gets its gradient back, unlike a tensor that the user detaches.
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


disable_modes = _disable_current_modes  # disables active dispatch modes only


disable_torch_function = torch._C.DisableTorchFunction  # disables modes that intercept torch functions


def dispatch_modes() -> list[TorchDispatchMode]:
    """Return the active dispatch modes of this thread, innermost last. An autograd thread has its caller's modes."""
    return _get_current_dispatch_mode_stack()


def function_modes() -> list[TorchFunctionMode]:
    """Return the active modes that intercept torch functions, but for a default device."""
    return [each for each in _get_current_function_mode_stack() if not isinstance(each, DeviceContext)]


def backward_number() -> int:
    """Return the number of the running backward; -1 if none is running. A backward inside another has its own."""
    return torch._C._current_graph_task_id()


def backward_node_number(outside: int = -1) -> int | None:
    """Return the number of the autograd node with the running backward, or None. See `next_node_number`.

    A backward with the number `outside` does not count.
    """
    if torch._C._current_graph_task_id() in (-1, outside):
        return None
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_node_number() -> int:
    return torch._C._autograd._get_sequence_nr()


def differentiating_level() -> int:
    """Return the number of active torch.func levels that differentiate (grad, vjp, jvp)."""
    kinds = torch._C._functorch.TransformType
    return sum(key in (kinds.Grad, kinds.Jvp) for key in _level_keys())


def is_inside_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def has_functorch_level(tensors: Sequence[Any]) -> bool:
    inside, recorded = is_inside_transform(), torch.is_grad_enabled()
    found = (x for x in tensors if isinstance(x, torch.Tensor))
    return any((recorded and x.requires_grad) or (inside and is_functorch_wrapped(x)) for x in found)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def mapped_dims(tensor: torch.Tensor) -> list[int]:
    """Return the mapped dims of the plain tensor. Each dim is numbered without the dims before it in the list."""
    functorch, found = torch._C._functorch, []
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            found.append(functorch.maybe_get_bdim(tensor))
        tensor = functorch.get_unwrapped(tensor)
    return found[::-1]


def needs_higher_derivatives() -> bool:
    """Whether a forward-mode or second derivative is active, which fused kernels do not support."""
    keys = [*chain(*_around()), *_level_keys()]
    kinds = torch._C._functorch.TransformType
    return kinds.Jvp in keys or keys.count(kinds.Grad) > 1


@contextmanager
def fused_backwards() -> Iterator[None]:
    """Let an outermost `torch.func.grad` inside use torch's fused backward ops, which have no derivative themselves."""
    # torch.func makes every gradient differentiable. For a group norm, SiLU and others, torch then decomposes the
    # backward into many ops. A plain `loss.backward()` does not.
    with _replaced.active(), pushed(_fused(), True):
        yield


def takes_one_gradient() -> bool:
    """Whether the active torch.func levels are one gradient, in `fused_backwards`: its backward has no derivative."""
    return (_fused() or [False])[-1] and [*chain(*_around()), *_level_keys()] == [_Transform.Grad]


@contextmanager
def gradient_level(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Enter a torch.func level that differentiates, as the only one. Yield the tensors, to be differentiated by."""
    with temporarily_clear_interpreter_stack(), grad_increment_nesting() as level, torch.enable_grad():
        wrapped = [torch._C._functorch._wrap_for_grad(tensor, level) for tensor in tensors]
        yield _create_differentiable(wrapped, level)


_Transform = torch._C._functorch.TransformType


def _fused() -> list[bool]:
    return of_thread("fused backwards", list)


def _autograd_grad(*args: Any, create_graph: bool = True, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    once = (_fused() or [False])[-1] and len([*chain(*_around()), *_level_keys()]) == 1
    found: tuple[torch.Tensor, ...] = _replaced.originals[0](*args, create_graph=create_graph and not once, **kwargs)
    return found


_replaced = Replacement((torch._functorch.eager_transforms, "_autograd_grad", _autograd_grad))


def counting_levels() -> AbstractContextManager[None]:
    """Count the active torch.func levels in `needs_higher_derivatives`, although a trace disables them."""
    # They will differentiate or map the traced ops.
    return pushed(_around(), _level_keys())


def _around() -> list[list[Any]]:
    return of_thread("levels around a trace", list)


def _level_keys() -> list[Any]:
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or []]
