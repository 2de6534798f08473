"""Real text that every machine has: the Python standard library's own source, as bytes."""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

import torch


def load(path: str | None = None, most: int = 8_000_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes.

    A file is held out as a whole, by a hash of its name, so what is measured was not trained on. Without a path, the
    standard library's own modules; else every text file under the path, or the one file, whose last tenth is held out.
    """
    if path is not None and Path(path).is_file():
        data = _tensor(Path(path).read_bytes()[:most])
        return data[: -len(data) // 10], data[-len(data) // 10 :]
    root = Path(path or sysconfig.get_paths()["stdlib"])
    pattern = "*.py" if path is None else "**/*"
    files = [file for file in sorted(root.glob(pattern)) if file.is_file()]
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for file in files:
        parts[zlib.crc32(file.name.encode()) % 10 == 0].append(file.read_bytes())
    train, held_out = (b"".join(parts[flag])[:most] for flag in (False, True))
    return _tensor(train), _tensor(held_out)


def batch(data: torch.Tensor, size: int, time: int, step: int, seed: int) -> torch.Tensor:
    """The windows of one step, (size, time + 1): a function of seed and step, so that a resumed run goes on exactly."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, len(data) - time - 1, (size,), generator=generator)
    return data[starts[:, None] + torch.arange(time + 1)].long()


def _tensor(text: bytes) -> torch.Tensor:
    if len(text) < 2000:
        raise SystemExit("the corpus is too small: give --data a text of at least a few thousand bytes")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
