"""Checksums of files, per block of 4 MiB: xxh3 by the extra `xxhash`, else crc32 of the standard library."""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Callable
from typing import Protocol

from ..errors import CheckpointError

BLOCK = 4 << 20  # bytes; a multiple of the size of every page and dtype


class Hasher(Protocol):
    def update(self, data: memoryview | bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Crc32:
    def __init__(self) -> None:
        self.value = 0

    def update(self, data: memoryview | bytes) -> None:
        self.value = zlib.crc32(data, self.value)

    def hexdigest(self) -> str:
        return f"{self.value:08x}"


def default_algorithm() -> str:
    return "xxh3_64" if importlib.util.find_spec("xxhash") is not None else "crc32"


def hasher(algorithm: str) -> Callable[[], Hasher]:

    if algorithm == "crc32":
        return _Crc32
    if algorithm == "xxh3_64":
        try:
            found: Callable[[], Hasher] = importlib.import_module("xxhash").xxh3_64
        except ImportError:
            raise CheckpointError(
                "the checksums of this checkpoint are xxh3_64, which needs the package xxhash: pip install xxhash"
            ) from None
        return found
    raise CheckpointError(f"the checksums of this checkpoint are {algorithm!r}, which this version does not know")
