"""Random generators of torch, and initialisers that read the values they draw."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["default_generator", "inits_by"]


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that ops on a device use; None for other devices than CPU and CUDA."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


@contextmanager
def inits_by(call: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Replace a call of an initialiser that reads values by `call(function, tensor, …)`, in this thread.

    The initialiser of a truncated normal redraws values outside its bounds. The public function looks up the private
    one, which redraws, by name.
    """
    thread, plainly = threading.get_ident(), torch.nn.init._no_grad_trunc_normal_

    def trunc_normal_(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if threading.get_ident() != thread:
            return plainly(tensor, mean, std, a, b, generator)
        return call(plainly, tensor, mean, std, a, b, generator=generator)

    with _one_at_a_time:
        torch.nn.init._no_grad_trunc_normal_ = trunc_normal_
        try:
            yield
        finally:
            torch.nn.init._no_grad_trunc_normal_ = plainly


_one_at_a_time = threading.RLock()
