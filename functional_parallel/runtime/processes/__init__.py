"""One rank of a mesh per process, over torch.distributed."""

from .processes import ProcessRuntime

__all__ = [
    "ProcessRuntime",
]
