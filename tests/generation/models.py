"""Small models that generate: examples/gpt.py and the families of tests/models, with prompts."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache, partial
from typing import Any

import optree
import torch
from torch import Tensor

from sharding_specs import split
from tests.layout_of_code import ROOT
from tests.models.families import CAUSAL, made

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [40, 41, 42, 43]]


@cache
def gpt() -> Any:
    spec = importlib.util.spec_from_file_location("gpt_that_generates", ROOT / "examples" / "gpt.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFIG: Any = {"layers": 2, "embed": 16, "heads": 4, "vocab": 32}


def forward(params: Any, tokens: Tensor) -> Tensor:
    found: Tensor = gpt().logits(params, tokens, gpt().Config(**CONFIG))
    return found


def cached() -> dict[str, Any]:
    """Arguments of a generator of the GPT."""
    return {"fn": partial(gpt().cached_logits, config=gpt().Config(**CONFIG)), "cache": gpt().empty_cache}


@cache
def parameters(dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """Parameters with logits that are not close to each other, and their specs."""
    params, specs = split(gpt().init(gpt().Config(**CONFIG)))
    return optree.tree_map(lambda x: x.to(dtype) * 5, params), specs


FAMILIES = [*CAUSAL, "T5", "BART", "BLOOM"]


def model_of(family: str) -> Any:
    """An unmodified model of transformers in float32 that does not end by itself, in training mode."""
    options: dict[str, Any] = {"Mistral": {"sliding_window": 4}, "Gemma3": {"sliding_window": 4}}.get(family, {})
    model: Any = made(family, **options)[0].float()
    if family == "BLOOM":  # with the autograd.Function of its activation
        from transformers.models.bloom.modeling_bloom import BloomGelu

        for block in model.transformer.h:
            block.mlp.gelu_impl = BloomGelu()  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = model.config.get_text_config().pad_token_id or 0
    return model


def generated_by_transformers(model: Any, prompts: list[list[int]], new: int) -> Tensor:
    """New tokens by `model.generate`, which is greedy here."""
    most, pad, is_left = (
        max(map(len, prompts)),
        model.generation_config.pad_token_id,
        not model.config.is_encoder_decoder,
    )
    ids, mask = torch.full((len(prompts), most), pad), torch.zeros(len(prompts), most, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        where = slice(most - len(prompt), most) if is_left else slice(len(prompt))
        ids[row, where], mask[row, where] = torch.tensor(prompt), 1
    mode, found = model.training, model.eval().generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
    model.train(mode)
    result: Tensor = found[:, most if is_left else 1 :]
    return result
