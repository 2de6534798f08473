"""Detection of writes to a tensor through any alias, without reading its values.

torch counts writes in `_version`, but not the writes of `p.data.mul_(2)` or of a storage. A lazy clone shares the
memory of a tensor until either of them is written: the written one moves to new memory. While the clone is
alive, a tensor at its old address therefore has its old values. A reader that wants a writable pointer, such as
`numpy()`, moves it too.
"""

from __future__ import annotations

import torch


def address(x: torch.Tensor) -> int:
    """Return the address of the first element, or 0 if the tensor has no memory. It does not count as a write."""
    found: int = torch._C._data_address(x) if x.layout is torch.strided else 0  # type: ignore[attr-defined]
    return found


def lazy_clone(x: torch.Tensor) -> torch.Tensor | None:
    """Return a copy that shares its memory until one of the two is written. None if torch cannot share this memory."""
    try:  # memory of NumPy, of a file or of several processes cannot be shared
        found: torch.Tensor = torch._lazy_clone(x.detach())
    except RuntimeError:
        return None
    return found if address(found) == address(x) else None
