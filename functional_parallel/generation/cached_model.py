"""Models with a cache of keys and values: a function and its cache, or an unmodified model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import optree
import torch
from torch import nn

from ..functions import PyTree
from ..interop import hugging_face

Logits = torch.Tensor
Cached = tuple[Logits, PyTree]


class CachedModel(Protocol):
    """Model that reads a text in several calls. Tensors of its cache have rows as their first dim, or no dims.

    Attributes:
        module: module with a mode; generation uses the mode `eval`. None for a function.
        is_padded_left: whether prompts of a batch end at the same column.
        is_encoder_decoder: whether prompts go to an encoder, and the text begins with `first_token`.
        first_token: see above.
    """

    @property
    def module(self) -> Any: ...
    @property
    def is_padded_left(self) -> bool: ...
    @property
    def is_encoder_decoder(self) -> bool: ...
    @property
    def first_token(self) -> int: ...

    def require(self, prompts: list[torch.Tensor], new_tokens: int) -> None:
        """Check that the model can read the prompts and write this number of tokens."""

    def slots(self, prompt: int, cache: int) -> tuple[int, int]:
        """Return the lengths of padded prompts and of the cache, given the lengths of the buckets."""

    def slot_dims(self, cache: PyTree) -> PyTree:
        """Return the dim of slots of each tensor of a cache where all rows write into one slot, -1 for others.

        None for a cache where a row writes into its own slots.
        """

    def begin(self, params: PyTree, tokens: torch.Tensor, lengths: torch.Tensor, length: int) -> Cached:
        """Read prompts. Return logits of all columns, and a cache of this length."""

    def proceed(self, params: PyTree, cache: PyTree, tokens: torch.Tensor, positions: torch.Tensor) -> Cached:
        """Read further tokens, with their positions in the rows. Return their logits, and the new cache."""


@dataclass(frozen=True)
class FunctionWithCache:
    """`f(params, cache, tokens, positions) -> (logits, cache)`, with `cache(params, rows, length)` for an empty cache.

    `f` writes keys and values of a token into the slot of its position, and reads the slots up to it.
    """

    f: Callable[..., Cached]
    cache: Callable[[PyTree, int, int], PyTree]
    module: Any = None
    is_padded_left: bool = False
    is_encoder_decoder: bool = False
    first_token: int = 0

    def require(self, prompts: list[torch.Tensor], new_tokens: int) -> None:
        pass

    def slots(self, prompt: int, cache: int) -> tuple[int, int]:
        return prompt, cache

    def slot_dims(self, cache: PyTree) -> PyTree:
        return None

    def begin(self, params: PyTree, tokens: torch.Tensor, lengths: torch.Tensor, length: int) -> Cached:
        rows, columns = tokens.shape
        positions = torch.arange(columns, device=tokens.device).expand(rows, columns)
        empty = self.cache(params, rows, length)
        for leaf in optree.tree_leaves(empty):
            if not isinstance(leaf, torch.Tensor):
                raise ValueError(
                    f"cache(params, {rows}, {length}) has a {type(leaf).__name__}: a cache is a tree of tensors, with "
                    "rows first. Caches of transformers grow by each token, or count tokens in Python, of which a "
                    "program has one number: give a model of transformers without cache=, or tensors"
                )
        return self.f(params, empty, tokens, positions)

    def proceed(self, params: PyTree, cache: PyTree, tokens: torch.Tensor, positions: torch.Tensor) -> Cached:
        return self.f(params, cache, tokens, positions)


def cached_model(fn: Any, cache: Callable[[PyTree, int, int], PyTree] | None = None) -> CachedModel:
    """Return a model with its cache.

    Args:
        fn: a model of transformers, its function of `fp.functional`, or with `cache`, a function of params, cache,
            tokens and positions.
        cache: function of params, rows and length that returns an empty cache.

    Raises:
        ValueError: if the cache is missing, or the model of transformers keeps a cache that is not supported.
    """
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "module", None)
    if cache is not None:
        return FunctionWithCache(fn, cache)
    if module is None:
        raise ValueError(
            f"{getattr(fn, '__name__', fn)!r} is a function without a cache of keys and values: give "
            "cache=lambda params, rows, length: …, and a function f(params, cache, tokens, positions) -> (logits, "
            "cache); or give a model of transformers, which has its own"
        )
    return hugging_face.cached_model(fn, module)
