"""Models of transformers that generate, with caches of plain tensors in place of transformers' cache objects.

The caches of transformers grow by each token (a program per length), or count in Python (a trace has one number for all
tokens, and is wrong). Here a layer's keys and values have a fixed number of slots, and the slot of a token is a tensor.
The model gets a mask of the slots that have tokens, and the position of each token, so prompts of several lengths are
padded on the left.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import nn

from ...functions import PyTree, functional

Layers = list[tuple[torch.Tensor, torch.Tensor]]

_SHIFTED = {"gpt_neo"}  # the attention reads from the number of keys where the query is: its slot must be last
_OTHER_STATES = ("mamba", "ssm", "recurrent", "rwkv", "linear_attention", "conv")
_NOT_BUILT: Mapping[str, tuple[Any, ...]] = {  # options of a generation_config, with the values that have no effect
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups"), (None, 1)),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "typical_p"), (None, 1)),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (None, 0)
    ),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty", "penalty_alpha", "min_p"), (None, 0)),
    **dict.fromkeys(("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "force_words_ids"), (None,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "constraints"), (None, [], {})),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "dola_layers"), (None,)),
    **dict.fromkeys(
        ("prompt_lookup_num_tokens", "stop_strings", "max_time", "top_h", "use_mtp", "token_healing"), (None, False)
    ),
}


def cached_model(fn: Callable[..., Any], module: nn.Module) -> CausalModel:
    """Return a model of transformers with its cache."""
    config = getattr(module, "config", None)
    if not hasattr(config, "model_type") or not hasattr(module, "generation_config"):
        raise ValueError(
            f"{type(module).__name__} is not a model of transformers that generates: give a function f(params, cache, "
            "tokens, positions) -> (logits, cache), and cache=lambda params, rows, length: … for an empty cache"
        )
    _require_plain_cache(module, config)
    _require_built(module.generation_config)
    return EncoderDecoderModel(fn, module) if getattr(config, "is_encoder_decoder", False) else CausalModel(fn, module)


def _require_plain_cache(module: nn.Module, config: Any) -> None:
    text = config.get_text_config(decoder=True)
    kinds = {*(getattr(text, "layer_types", None) or ()), type(module).__name__.lower(), text.model_type}
    other = sorted({kind for kind in kinds for name in _OTHER_STATES if name in kind})
    if other or getattr(module, "_is_stateful", False):
        raise ValueError(
            f"{type(module).__name__} keeps another state than keys and values ({', '.join(other) or 'recurrent'}), "
            "which fp.generate does not have: use model.generate(), or write f(params, cache, tokens, positions)"
        )


def _require_built(options: Any) -> None:
    given = {name: getattr(options, name, None) for name in _NOT_BUILT}
    other = [f"{name}={value!r}" for name, value in given.items() if value not in _NOT_BUILT[name]]
    if other:
        raise ValueError(
            f"model.generation_config has {', '.join(other)}, which fp.generate does not do, so its text would differ "
            "from model.generate(): set it to None if the text is right without"
        )


def _part(index: int) -> property:
    """An attribute that is a part of `held`; transformers' class assigns None to it."""
    return property(lambda layer: None if layer.held is None else layer.held[index], lambda layer, value: None)


@cache
def _layer_class() -> type[Any]:
    from transformers.cache_utils import CacheLayerMixin

    class FixedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
        """Keys and values of a layer in a fixed number of slots. `slot` is the slot of the first new token.

        An empty layer has no tensors. It returns the new keys alone, so the mask is the mask of a model without cache.
        """

        is_sliding = False
        is_compileable = True  # one query gets a mask of the slots too

        def __init__(
            self, length: int, slot: Any, held: tuple[torch.Tensor, torch.Tensor] | None, shifted: bool
        ) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.length, self.slot, self.held, self.shifted = length, slot, held, shifted
            self.is_initialized = True

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            pass

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **named: Any) -> Any:
            new = (key_states, value_states)
            if self.held is None:
                free = self.length - key_states.shape[2]
                ends = (0, 0, free, 0) if self.shifted else (0, 0, 0, free)
                self.held = (F.pad(key_states, ends), F.pad(value_states, ends))
                return new
            keys, values = (self._written(*each) for each in zip(self.held, new, strict=True))
            self.held = (keys, values)
            return self.held

        def _written(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            count = new.shape[2]
            if self.shifted:
                return torch.cat([held[:, :, count:], new], 2)
            return held.index_copy(2, torch.arange(count, device=new.device) + self.slot, new)

        keys, values = _part(0), _part(1)

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return (query_length if self.held is None else self.length), 0

        def get_seq_length(self) -> Any:
            return self.slot

        def get_max_length(self) -> int:
            return self.length

    return FixedLayer


class CausalModel:
    """Decoder of transformers, which reads prompts that are padded on the left."""

    is_padded_left = True
    is_encoder_decoder = False
    first_token = 0

    def __init__(self, fn: Callable[..., Any], module: Any) -> None:
        self.module, self.config = module, module.config
        self.fn = functional(self.module)[0] if fn is module else fn
        self._text = module.config.get_text_config(decoder=True)
        taken = inspect.signature(type(module).forward).parameters
        self._cache_name = "cache" if "cache" in taken else "past_key_values"
        self._takes_positions = "position_ids" in taken
        self._shifted = self.config.model_type in _SHIFTED

    @property
    def _positions(self) -> int | None:
        found = getattr(self._text, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    def require(self, prompts: Sequence[torch.Tensor], new_tokens: int) -> None:
        """Check that the model has embeddings of the tokens and positions."""
        longest = max(map(len, prompts))
        if self._positions is not None and longest + new_tokens > self._positions:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens={new_tokens} need {longest + new_tokens} positions, "
                f"and {type(self.module).__name__} has max_position_embeddings={self._positions}: shorten one of them"
            )
        self._require_tokens(prompts)

    def _require_tokens(self, prompts: Sequence[torch.Tensor]) -> None:
        size = self._text.vocab_size
        wrong = sorted({int(token) for row in prompts for token in row if not 0 <= int(token) < size})
        if wrong:
            raise ValueError(f"the prompts have tokens {wrong[:5]}, and the vocabulary has {size}: 0 … {size - 1}")

    def slots(self, prompt: int, cache: int) -> tuple[int, int]:
        most = self._positions if self._shifted else None
        return (prompt, cache) if most is None else (min(prompt, most), min(cache, most))

    def slot_dims(self, cache: PyTree) -> PyTree:
        """Return the dim of slots of each tensor; -1 where a token has no slot of its own, but moves all others."""
        keys, seen = (-1, -1) if self._shifted else (2, 1)
        layers = optree.tree_map(lambda _: keys, cache["layers"])
        return {"layers": layers, "seen": seen, "slot": -1}

    def begin(
        self, params: PyTree, tokens: torch.Tensor, lengths: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, PyTree]:
        columns = tokens.shape[1]
        real = torch.arange(columns, device=tokens.device) - (columns - lengths[:, None])
        seen, free = (real >= 0).long(), length - columns
        layers = [self._layer(length, 0, None) for _ in range(self._text.num_hidden_layers)]
        logits, layers = self._call(params, layers, tokens, seen, real.clamp(min=0))
        slot = torch.full((), columns, dtype=torch.int64, device=tokens.device)
        seen = F.pad(seen, (free, 0) if self._shifted else (0, free))
        return logits, {"layers": layers, "seen": seen, "slot": slot}

    def proceed(
        self, params: PyTree, cache: PyTree, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, PyTree]:
        seen, slot, count = cache["seen"], cache["slot"], tokens.shape[1]
        length, new = seen.shape[1], torch.ones_like(tokens)
        if self._shifted:
            seen, first = torch.cat([seen[:, count:], new], 1), length - count
        else:
            seen, first = seen.index_copy(1, torch.arange(count, device=tokens.device) + slot, new), slot
        layers = [self._layer(length, first, held) for held in cache["layers"]]
        logits, layers = self._call(params, layers, tokens, seen, positions)
        return logits, {"layers": layers, "seen": seen, "slot": slot + count}

    def _layer(self, length: int, slot: Any, held: Any) -> Any:
        return _layer_class()(length, slot, held, self._shifted)

    def _call(
        self, params: PyTree, layers: list[Any], tokens: torch.Tensor, seen: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Layers]:
        from transformers.cache_utils import Cache

        named: dict[str, Any] = {"position_ids": positions} if self._takes_positions else {}
        named[self._cache_name] = Cache(layers=layers)
        output = self.fn(params, input_ids=tokens, attention_mask=seen, use_cache=True, **named)
        return output.logits, _held_by(layers, self.module)


class EncoderDecoderModel(CausalModel):
    """Encoder that reads the prompts, and decoder that begins with the start token of the model."""

    is_padded_left = False
    is_encoder_decoder = True

    def __init__(self, fn: Callable[..., Any], module: Any) -> None:
        super().__init__(fn, module)
        found = module.generation_config.decoder_start_token_id
        found = self.config.decoder_start_token_id if found is None else found
        if found is None:
            raise ValueError(
                f"{type(module).__name__}: config.decoder_start_token_id is None; set the decoder's first token"
            )
        self.first_token: int = found

    def require(self, prompts: Sequence[torch.Tensor], new_tokens: int) -> None:
        most, longest = self._positions, max(map(len, prompts))
        for what, count in (("a prompt", longest), ("max_new_tokens", new_tokens)):
            if most is not None and count > most:
                raise ValueError(
                    f"{what} of {count} tokens needs as many positions, and {type(self.module).__name__} has "
                    f"max_position_embeddings={most}: shorten it"
                )
        self._require_tokens(prompts)

    def begin(
        self, params: PyTree, tokens: torch.Tensor, lengths: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, PyTree]:
        columns = tokens.shape[1]
        read = (torch.arange(columns, device=tokens.device) < lengths[:, None]).long()
        first = torch.full_like(tokens[:, :1], self.first_token)
        count = self._text.num_hidden_layers
        own, cross = ([self._layer(each, 0, None) for _ in range(count)] for each in (length, columns))
        logits, encoded = self._both(params, own, cross, first, torch.ones_like(first), read, input_ids=tokens)
        slot = torch.zeros((), dtype=torch.int64, device=tokens.device)  # the first token is read again
        seen = F.pad(torch.zeros_like(first), (0, length - 1))
        return logits, {
            "layers": _held_by(own, self.module), "cross": _held_by(cross, self.module), "encoded": encoded,
            "read": read, "seen": seen, "slot": slot,
        }  # fmt: skip

    def proceed(
        self, params: PyTree, cache: PyTree, tokens: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, PyTree]:
        seen, slot, count = cache["seen"], cache["slot"], tokens.shape[1]
        slots = torch.arange(count, device=tokens.device) + slot
        seen = seen.index_copy(1, slots, torch.ones_like(tokens))
        own = [self._layer(seen.shape[1], slot, held) for held in cache["layers"]]
        cross = [self._layer(cache["read"].shape[1], cache["read"].shape[1], held) for held in cache["cross"]]
        encoded = cache["encoded"]
        logits, _ = self._both(params, own, cross, tokens, seen, cache["read"], encoder_outputs=(encoded,))
        return logits, {**cache, "layers": _held_by(own, self.module), "seen": seen, "slot": slot + count}

    def _both(
        self,
        params: PyTree,
        own: list[Any],
        cross: list[Any],
        tokens: torch.Tensor,
        seen: torch.Tensor,
        read: torch.Tensor,
        **given: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from transformers.cache_utils import Cache, EncoderDecoderCache

        both = EncoderDecoderCache(Cache(layers=own), Cache(layers=cross))
        both.is_updated = {index: layer.held is not None for index, layer in enumerate(cross)}
        given |= {"attention_mask": read, "decoder_input_ids": tokens, "decoder_attention_mask": seen}
        output = self.fn(params, **given, **{self._cache_name: both}, use_cache=True)
        return output.logits, output.encoder_last_hidden_state


def _held_by(layers: Sequence[Any], module: nn.Module) -> Layers:
    empty = [index for index, layer in enumerate(layers) if layer.held is None]
    if empty:
        raise ValueError(
            f"{type(module).__name__}: layers {empty} wrote no keys and values into the cache, so they keep another "
            "state or share one: fp.generate does not have it; use model.generate()"
        )
    return [layer.held for layer in layers]
