"""A dispatch mode that counts what it sees."""

from __future__ import annotations

from functional_parallel import _torch


class Count(_torch.TorchDispatchMode):
    """Counts the ops it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))
