"""Small models that generate: examples/gpt.py, the families of tests/models, T5 and BART, with prompts and rules."""

from __future__ import annotations

import importlib.util
import sys
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import optree
import torch
from torch import Tensor

from sharding_specs import P, split
from tests.layout_of_code import ROOT
from tests.models import test_families

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [40, 41, 42, 43]]

COLUMNS = (
    *("*[qkv]_proj.weight", "*[qkv]_proj.bias", "*gate_proj.weight", "*up_proj.weight", "*embed_tokens.weight"),
    *("*fc1.weight", "*fc1.bias", "*dense_h_to_4h.weight", "*dense_h_to_4h.bias", "*mlp.c_fc.bias", "*wi.weight"),
    *("*Attention.[qkv].weight", "lm_head.weight", "embed_out.weight", "*embed_in.weight", "*shared.weight"),
)
ROWS = ("*o_proj.weight", "*out_proj.weight", "*down_proj.weight", "*fc2.weight", "*dense_4h_to_h.weight", "*.o.weight")
RULES = {**dict.fromkeys(COLUMNS, P("tensor")), **dict.fromkeys(ROWS, P(None, "tensor"))}
RULES |= {"*wo.weight": P(None, "tensor"), "*relative_attention_bias.weight": P(None, "tensor")}
RULES |= {"*mlp.gate_up_proj.weight": P((2, "tensor")), "*experts*": P()}


def rules_for(params: dict[str, Tensor]) -> dict[str, P]:
    """Layouts over `tensor`, by rules that find something."""
    return {pattern: spec for pattern, spec in RULES.items() if any(fnmatchcase(name, pattern) for name in params)}


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


def t5() -> Any:
    import transformers

    options: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**options, **tokens, dropout_rate=0.0))


def bart() -> Any:
    import transformers

    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in BART.items()}
    tokens = {"decoder_start_token_id": 2, "pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
    options: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 32, "dropout": 0.0}
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**options, **sides, **tokens, forced_eos_token_id=None)
    )


BART = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
FAMILIES = [name for name in test_families.FAMILIES if name != "GPT-J"]


def model_of(family: str) -> Any:
    """An unmodified model of transformers that does not end by itself."""
    model: Any = {"T5": t5, "BART": bart}[family]() if family in ("T5", "BART") else test_families.model_of(family)
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
