"""Prompts of several lengths as one padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..quantities import is_positive_int
from .cached_model import CachedModel

_SMALLEST = 16


@dataclass(frozen=True)
class LengthBuckets:
    """Lengths to which prompts and caches are padded; by default powers of 2 from 16."""

    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = self.lengths
        if given is not None and (
            not given or not all(map(is_positive_int, given)) or list(given) != sorted(set(given))
        ):
            raise ValueError(f"buckets={given!r}: give ascending lengths, such as (32, 128, 512)")

    def at_least(self, length: int, what: str) -> int:
        """Return the smallest bucket of at least this length."""
        if self.lengths is None:
            return max(_SMALLEST, 1 << (length - 1).bit_length())
        found = next((each for each in self.lengths if each >= length), None)
        if found is None:
            raise ValueError(f"{what} of {length} tokens is longer than the longest bucket, {self.lengths[-1]}")
        return found


def rows_of(prompts: Any, model: CachedModel) -> list[torch.Tensor]:
    """Return the tokens of each row, without padding."""
    mask = None
    if isinstance(prompts, Mapping):
        prompts, mask = prompts["input_ids"], prompts.get("attention_mask")
    if isinstance(prompts, torch.Tensor) and prompts.ndim != 2:
        raise ValueError(f"prompts of shape {tuple(prompts.shape)}: give rows of tokens, (rows, columns)")
    rows = [torch.as_tensor(row) for row in prompts]
    if mask is not None:
        rows = [_real(index, *each) for index, each in enumerate(zip(rows, mask, strict=True))]
    elif isinstance(prompts, torch.Tensor):
        _refuse_padding(rows, model)
    for index, row in enumerate(rows):
        if row.ndim != 1 or not row.numel() or row.dtype.is_floating_point or row.dtype is torch.bool:
            raise ValueError(f"prompt {index}: {_text(row)}; a prompt is a list of one or more token numbers")
    if not rows:
        raise ValueError("there are no prompts: give a list with one or more rows of tokens")
    return [row.long() for row in rows]


def _real(index: int, row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = torch.as_tensor(mask).bool()
    real = kept.nonzero().flatten()
    if len(real) and len(real) != int(real[-1] - real[0]) + 1:
        raise ValueError(f"prompt {index}: the attention mask leaves out tokens between others, not padding at an end")
    return row[kept]


def _refuse_padding(rows: Sequence[torch.Tensor], model: CachedModel) -> None:
    config = getattr(model.module, "config", None)
    pad = getattr(config, "pad_token_id", None)
    others = {getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "decoder_start_token_id")}
    if pad is None or pad in others - {getattr(config, "decoder_start_token_id", None)}:
        return
    for index, row in enumerate(rows):
        if row.numel() and pad in (int(row[0]), int(row[-1])):
            side = "right" if int(row[-1]) == pad else "left"
            raise ValueError(
                f"prompt {index} is padded on the {side} with token {pad}, and would be read as text: give the dict of "
                "the tokenizer with its attention_mask, or a list with the tokens of each row"
            )


def _text(row: torch.Tensor) -> str:
    return f"{tuple(row.shape)} {str(row.dtype).removeprefix('torch.')}"


class Prompts:
    """Rows of tokens, of which a prefill reads all but the last, and the first decode step reads the last."""

    def __init__(self, rows: list[torch.Tensor], model: CachedModel, multiple: int) -> None:
        missing = -len(rows) % multiple
        self.rows, self.model = rows + [rows[0]] * missing, model
        if model.is_encoder_decoder:
            first = torch.tensor([model.first_token])
            self.read, self.last = self.rows, [first] * len(self.rows)
        else:
            self.read, self.last = [row[:-1] for row in self.rows], [row[-1:] for row in self.rows]

    @property
    def longest(self) -> int:
        """Number of tokens that the prefill reads of the longest row."""
        return max(map(len, self.read))

    def padded(self, columns: int, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the batch of the prefill, padded to this number of columns."""
        lengths = torch.tensor([len(row) for row in self.read])
        tokens = torch.zeros(len(self.read), columns, dtype=torch.int64)
        for row, read in zip(tokens, self.read, strict=True):
            start = columns - len(read) if self.model.is_padded_left else 0
            row[start : start + len(read)] = read
        keys = torch.cat([keys, keys[:1].expand(len(self.rows) - len(keys))])
        positions = torch.zeros_like(lengths) if self.model.is_encoder_decoder else lengths
        return {
            "tokens": tokens,
            "lengths": lengths,
            "token": torch.cat(self.last),
            "position": positions,
            "keys": keys,
        }
