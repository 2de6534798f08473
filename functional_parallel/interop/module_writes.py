"""Writes to the parameters and buffers of a module, found per call without reading them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import _torch
from ..ir import checksum


class Writes:
    """Parameters that have been written since `arm`, by any alias: `p.data`, a view, or the storage.

    A lazy clone has the old values, and takes no memory before a write. Of memory that cannot be shared this way, such
    as memory of NumPy, main memory is compared by checksum, other memory by torch's count of writes.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters, self._tensors = dict(parameters), [*parameters.values()]
        self._clones: dict[str, torch.Tensor | None] = {}
        self._sums: dict[str, str] = {}
        self.arm()

    def arm(self) -> None:
        self.release()
        self._clones = {name: _torch.lazy_clone(each) for name, each in self._parameters.items()}
        unshared = {name: self._parameters[name] for name, clone in self._clones.items() if clone is None}
        self._sums = {name: checksum(each) for name, each in unshared.items() if each.device.type == "cpu"}
        self._marks = self._now()

    def follow(self, named: Mapping[str, torch.Tensor]) -> None:
        self._parameters = {name: named.get(name, each) for name, each in self._parameters.items()}
        self._tensors = [*self._parameters.values()]

    def had(self, name: str, value: torch.Tensor) -> bool:
        clone = self._clones.get(name)
        return clone is not None and clone.device == value.device and torch.equal(clone, value)

    def release(self) -> None:
        """Forget the old values, so that a write stays in the memory of the parameter."""
        self._clones, self._sums = {}, {}

    def found(self) -> dict[str, torch.Tensor]:
        now = self._now()
        if now == self._marks and not self._sums:
            return {}
        changed = {
            name: each
            for (name, each), old, new in zip(self._parameters.items(), self._marks, now, strict=True)
            if self._is_written(name, each, old == new)
        }
        if now != self._marks and not changed:  # moved by a reader that wants a writable pointer
            self.arm()
        return changed

    def _now(self) -> list[tuple[int, int]]:
        return [(_torch.address(each), each._version) for each in self._tensors]

    def _is_written(self, name: str, parameter: torch.Tensor, is_marked: bool) -> bool:
        clone = self._clones[name]
        if clone is None:
            return checksum(parameter) != self._sums[name] if name in self._sums else not is_marked
        if is_marked:
            return False
        alike = clone.dtype == parameter.dtype and clone.device == parameter.device and clone.shape == parameter.shape
        return not alike or not torch.equal(clone, parameter.detach())
