"""A process group of torch's, for as long as torch holds it.

Held here it would outlive `destroy_process_group`, and gloo's threads, which end with their group, would outlive the
interpreter: one that frees a tensor then ends the process with SIGABRT.
"""

from __future__ import annotations

import weakref
from typing import Any

__all__ = ["ProcessGroupRef"]


class ProcessGroupRef:
    """A reference that does not keep its group.

    Args:
        group: a process group that torch.distributed holds.
    """

    __slots__ = ("_group",)

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)

    @property
    def group(self) -> Any:
        """The group.

        Raises:
            RuntimeError: when it was let go.
        """
        if (group := self._group()) is None:
            raise RuntimeError("torch.distributed.destroy_process_group() has let the processes go")
        return group
