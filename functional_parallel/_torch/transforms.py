"""Which transforms and modes of torch look on, and tensors without what these wrap around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = [
    "TorchDispatchMode",
    "backward_node_number",
    "counting_levels",
    "differentiating_level",
    "disable_functorch",
    "disable_modes",
    "disable_torch_function",
    "dispatch_modes",
    "has_functorch_level",
    "is_above_autograd",
    "is_functorch_wrapped",
    "is_inside_transform",
    "mapped_dims",
    "needs_higher_derivatives",
    "next_node_number",
    "unwrap",
]


@contextmanager
def disable_functorch() -> Iterator[None]:
    """Set aside active dispatch modes and torch.func levels: what runs inside sees plain tensors."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def is_above_autograd() -> bool:
    """Whether an op was called where autograd would still see it, though dispatch modes see it already.

    So torch detaches a result that a backward op saves, to save it and each time that it is looked up: it has its
    gradient again then, unlike what a user detaches.
    """
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


disable_modes = _disable_current_modes  # set aside active dispatch modes only


disable_torch_function = torch._C.DisableTorchFunction  # and those that see torch's functions


def dispatch_modes() -> list[TorchDispatchMode]:
    """The active dispatch modes, innermost last: this thread's; in one of autograd's, those of its caller."""
    return _get_current_dispatch_mode_stack()


def backward_node_number() -> int | None:
    """The number of the autograd node whose backward is running now, which its forward got from `next_node_number`."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_node_number() -> int:
    """The number that the next autograd node of this thread will carry."""
    return torch._C._autograd._get_sequence_nr()


def differentiating_level() -> int:
    """How many torch.func levels that differentiate (grad, vjp, jvp) are active here."""
    stack = torch._C._functorch.get_interpreter_stack()
    differentiating = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return 0 if stack is None else sum(level.key() in differentiating for level in stack)


def is_inside_transform() -> bool:
    """Whether some torch.func level is active here."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor belongs to a torch.func level (a gradient-tracking or batched wrapper)."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def has_functorch_level(tensors: Sequence[Any]) -> bool:
    """Whether some tensor takes part in a derivative or a vmap."""
    inside, recorded = is_inside_transform(), torch.is_grad_enabled()
    found = (x for x in tensors if isinstance(x, torch.Tensor))
    return any((recorded and x.requires_grad) or (inside and is_functorch_wrapped(x)) for x in found)


def unwrap(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside all torch.func wrappers."""
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def mapped_dims(tensor: torch.Tensor) -> list[int]:
    """The dims of the plain tensor inside that vmap levels map, each counted without those before it."""
    functorch, found = torch._C._functorch, []
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            found.append(functorch.maybe_get_bdim(tensor))
        tensor = functorch.get_unwrapped(tensor)
    return found[::-1]


def needs_higher_derivatives() -> bool:
    """Whether a forward-mode or a second derivative is being taken here, which fused kernels do not have."""
    keys = [*_around.get(), *_level_keys()]
    kinds = torch._C._functorch.TransformType
    return kinds.Jvp in keys or keys.count(kinds.Grad) > 1


_around: ContextVar[tuple[Any, ...]] = ContextVar("levels around a trace", default=())


@contextmanager
def counting_levels() -> Iterator[None]:
    """Count the torch.func levels that are active now in `needs_higher_derivatives`, though a trace sets them aside.

    They will differentiate or map what the trace records.
    """
    token = _around.set((*_around.get(), *_level_keys()))
    try:
        yield
    finally:
        _around.reset(token)


def _level_keys() -> list[Any]:
    return [level.key() for level in torch._C._functorch.get_interpreter_stack() or []]
