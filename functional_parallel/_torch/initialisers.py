"""What torch fills new tensors with: its generators, and the initialisers that look at the values they draw."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["default_generator", "inits_by"]


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that ops on a device draw from; None where it is not known."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


@contextmanager
def inits_by(call: Callable[..., Any]) -> Iterator[None]:
    """Inside, in this thread, `call(function, tensor, …)` stands for an initialiser that looks at values.

    That of a truncated normal draws again what lies outside its bounds. Its public function asks for the private one,
    which does so, by name.
    """
    thread, plainly = threading.get_ident(), torch.nn.init._no_grad_trunc_normal_

    def trunc_normal_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        by = call if threading.get_ident() == thread else _plainly
        return by(plainly, tensor, *args, **kwargs)

    with _one_at_a_time:
        torch.nn.init._no_grad_trunc_normal_ = trunc_normal_
        try:
            yield
        finally:
            torch.nn.init._no_grad_trunc_normal_ = plainly


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


_one_at_a_time = threading.RLock()
