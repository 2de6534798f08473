"""Prompts of several lengths as one padded batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..quantities import is_positive_int
from .cached_model import CachedModel

_SMALLEST = 16
_WITHOUT_EFFECT = ("special_tokens_mask", "offset_mapping", "length")  # which tokenizers return on request
_ROWS = "give a list with the tokens of each row, such as tokenizer(texts)['input_ids'], or the tokenizer's dict"


@dataclass(frozen=True)
class LengthBuckets:
    """Lengths of padded prompts and caches; by default powers of 2 from 16."""

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
    tokens, mask = _of_tokenizer(prompts) if isinstance(prompts, Mapping) else (prompts, None)
    if isinstance(tokens, torch.Tensor) and tokens.ndim != 2:
        raise ValueError(f"prompts of shape {tuple(tokens.shape)}: give rows of tokens, (rows, columns)")
    if not isinstance(tokens, (torch.Tensor, Sequence)) or isinstance(tokens, (str, bytes)):
        raise ValueError(f"prompts={_short(tokens)}: {_ROWS}")
    rows = [_row(index, row) for index, row in enumerate(tokens)]
    if not rows:
        raise ValueError("there are no prompts: give a list with one or more rows of tokens")
    if mask is not None:
        if len(mask) != len(rows):
            raise ValueError(f"{len(rows)} prompts and an attention mask of {len(mask)} rows: give it a row per prompt")
        rows = [_real(index, *each) for index, each in enumerate(zip(rows, mask, strict=True))]
    elif isinstance(tokens, torch.Tensor):
        _refuse_padding(rows, model)
    for index, row in enumerate(rows):
        if row.ndim != 1 or not row.numel() or row.dtype.is_floating_point or row.dtype is torch.bool:
            raise ValueError(f"prompt {index}: {_text(row)}; a prompt is a list of one or more token numbers")
        if int(row.min()) < 0:
            raise ValueError(f"prompt {index} has token {int(row.min())}: tokens are numbers from 0; leave padding out")
    return [row.long() for row in rows]


def _of_tokenizer(found: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the tokens and the mask of a tokenizer's dict."""
    unread = set(found) - {"input_ids", "attention_mask", *_WITHOUT_EFFECT}
    if not any(map(any, found.get("token_type_ids", ()))):  # they have an effect in few models, where they differ
        unread -= {"token_type_ids"}
    if "input_ids" not in found or unread:
        raise ValueError(
            f"prompts with {', '.join(map(repr, found))}: generation reads 'input_ids' and 'attention_mask' of a "
            "tokenizer; leave the others out if the text does not depend on them"
        )
    return found["input_ids"], found.get("attention_mask")


def _row(index: int, row: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"prompt {index} is {_short(row)}: {_ROWS}") from None


def _real(index: int, row: torch.Tensor, mask: Any) -> torch.Tensor:
    seen = _row(index, mask)
    if seen.shape != row.shape or not bool(((seen == 0) | (seen == 1)).all()):
        raise ValueError(
            f"prompt {index}: the attention mask, {_text(seen)}, is not a 0 or 1 for each of {_text(row)}: give the "
            "mask of the same call of the tokenizer"
        )
    real = seen.nonzero().flatten()
    if len(real) and len(real) != int(real[-1] - real[0]) + 1:
        raise ValueError(f"prompt {index}: the attention mask leaves out tokens between others, not padding at an end")
    return row[seen.bool()]


def _short(value: Any) -> str:
    return f"{value!r:.40}" if isinstance(value, (str, bytes, list, tuple)) else type(value).__name__


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
    """Rows of tokens. A prefill reads all but the last, and the first decode step reads the last."""

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
