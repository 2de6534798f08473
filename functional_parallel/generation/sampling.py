"""Choice of the next token from its scores: the best, or a draw with a key per row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .. import random
from ..draws import GOLDEN, numbers
from ..quantities import is_non_negative, is_number, is_positive_int


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits of the vocabulary.

    Args:
        temperature: divides the logits. 0 takes the best token.
        top_k: draw from this number of best tokens.
        top_p: draw from the fewest best tokens with at least this probability.

    Raises:
        ValueError: if a number is out of range, or tokens are to be chosen for a draw that does not take place.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not is_non_negative(self.temperature):
            raise ValueError(f"temperature={self.temperature!r}: it is 0 for the best token, or a positive number")
        if self.top_k is not None and not is_positive_int(self.top_k):
            raise ValueError(f"top_k={self.top_k!r}: it is a number of tokens, 1 or more, or None for all")
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r}: it is a probability above 0, or None for 1")
        if not self.temperature and not (self.top_k is self.top_p is None):
            raise ValueError(
                "top_k and top_p choose tokens for a draw, and temperature=0 draws none: give a temperature"
            )

    def draw(self, logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return a token for each row.

        A row's draw depends on its key, the position of the token in the row, and its logits. It does not depend on
        other rows, on the mesh, or on earlier draws.

        Args:
            logits: scores, (rows, vocabulary).
            keys: a key per row, (rows,).
            positions: position of the new token in each row, (rows,).
        """
        if not self.temperature:
            return logits.argmax(-1)
        scores = self.kept((logits.float() if logits.dtype.itemsize < 4 else logits) / self.temperature)
        places = torch.arange(scores.shape[-1], device=scores.device) * GOLDEN
        seeds = random.fold_in(keys, positions)  # then the numbers of fp.random.uniform(seed of the row, its scores)
        uniform = numbers(places + seeds[:, None], scores.dtype, None).clamp(min=torch.finfo(scores.dtype).tiny)
        return (scores - (-uniform.log()).log()).argmax(-1)  # Gumbel noise: its best is a draw by softmax

    def kept(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores with -inf for the tokens that top_k and top_p leave out."""
        vocabulary = scores.shape[-1]
        if self.top_k is not None and self.top_k > vocabulary:
            raise ValueError(
                f"top_k={self.top_k}: the vocabulary has {vocabulary} tokens; give at most as many, or None"
            )
        if self.top_k is None and self.top_p is None:
            return scores
        best, tokens = scores.sort(-1, descending=True)
        out = torch.arange(vocabulary, device=scores.device) >= (vocabulary if self.top_k is None else self.top_k)
        best = best.masked_fill(out, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            probability = best.softmax(-1)
            before = probability.cumsum(-1) - probability
            best = best.masked_fill(before >= self.top_p, -math.inf)
        return scores.scatter(-1, tokens, best)
