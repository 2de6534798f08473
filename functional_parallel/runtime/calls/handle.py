"""Weak reference to a torch process group.

A strong reference would outlive `destroy_process_group`. gloo's threads end with their group and would then outlive
the interpreter. A thread that frees a tensor after that ends the process with SIGABRT.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist


class ProcessGroupRef:
    """Weak reference to a process group that torch.distributed holds."""

    __slots__ = ("_group",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group, unless it was destroyed."""
        if (group := self._group()) is None:
            raise RuntimeError("torch.distributed.destroy_process_group() has let the processes go")
        return group
