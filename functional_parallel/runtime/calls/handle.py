"""Weak reference to a torch process group. A strong one would keep gloo's threads alive after `destroy_process_group`,
and a thread that frees a tensor after the interpreter has ended aborts the process.
"""

from __future__ import annotations

import weakref

import torch.distributed as dist


class ProcessGroupRef:
    __slots__ = ("_group",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    @property
    def group(self) -> dist.ProcessGroup:
        if (group := self._group()) is None:
            raise RuntimeError("torch.distributed.destroy_process_group() has let the processes go")
        return group
