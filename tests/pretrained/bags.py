"""Small models: of families, and one with any parameters. Reads of files that are counted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import functional_parallel as fp
from tests.models.families import FAMILIES, made

transformers = pytest.importorskip("transformers")


def model_of(family: str, experts: str = "grouped_mm", **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a small model in float32, and its batch."""
    model, batch = made(family, experts, **options)
    return model.float(), {key: x.float() if x.is_floating_point() else x for key, x in batch.items()}


def config_of(family: str, **options: Any) -> Any:
    return model_of(family)[0].config_class(**{**FAMILIES[family].options, **options})


class BagConfig(transformers.PreTrainedConfig):  # type: ignore[misc]
    model_type = "bag"

    def __init__(self, shapes: Mapping[str, Any] | None = None, **rest: Any) -> None:
        self.shapes = dict(shapes or {})
        super().__init__(**rest)


class Bag(transformers.PreTrainedModel):  # type: ignore[misc]
    """Has parameters of any shapes and dtypes, by name, and computes the sum of all."""

    config_class = BagConfig

    def __init__(self, config: BagConfig) -> None:
        super().__init__(config)
        for name, (shape, dtype) in config.shapes.items():
            values = torch.zeros(shape, dtype=getattr(torch, dtype))
            self.register_parameter(name, torch.nn.Parameter(values, values.is_floating_point()))
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = sum(parameter.float().sum() for parameter in self.parameters())
        assert isinstance(total, torch.Tensor)
        return x * total


def save_bag(folder: Path, shapes: Mapping[str, tuple[tuple[int, ...], str]], max_file: int) -> dict[str, torch.Tensor]:
    """Write a bag with distinct values as transformers does. Return its parameters."""
    model = Bag(BagConfig(shapes))
    place = 0
    for parameter in model.parameters():
        count = parameter.numel()
        parameter.data = (torch.arange(count) + place).reshape(parameter.shape).to(parameter.dtype)
        place += count
    model.save_pretrained(folder, max_shard_size=max_file)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Context in which the bytes of each read of a file of weights are noted, those of headers included."""
    found, read = list[int](), os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        count = read(file, buffers, offset)
        found.append(count)
        return count

    with patch.object(fp.checkpoint.files.os, "preadv", counted):
        yield found


def headers_of(folder: Path) -> int:
    """Return the bytes that opening the files reads: the length of each header, then that and the header."""
    sizes = [int.from_bytes(each.read_bytes()[:8], "little") for each in folder.glob("*.safetensors")]
    return sum(16 + size for size in sizes)
