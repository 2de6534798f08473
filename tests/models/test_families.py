"""Unmodified causal models of transformers, by the names in docs/hugging_face.md: loss and gradients of one device."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.testing import assert_equivalent
from sharding_specs import Mesh
from tests.layout_of_code import ROOT

transformers = pytest.importorskip("transformers")

PAGE = ROOT / "docs" / "hugging_face.md"
LLAMA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**LLAMA, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", GROUPED),
    "Qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "Mistral": ("Mistral", {**GROUPED, "sliding_window": 4}),
    "Gemma3": ("Gemma3", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "Phi3": ("Phi3", {**GROUPED, **TOKENS}),
    "OLMo2": ("Olmo2", {**GROUPED, **TOKENS}),
    "GPT-NeoX": ("GPTNeoX", {**LLAMA, "intermediate_size": 48, "max_position_embeddings": 32}),
    "Falcon": ("Falcon", LLAMA),
    "OPT": (
        "OPT",
        {**LLAMA, **TOKENS, "ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "GPT-2": ("GPT2", {**GPT, **NO_DROPOUT}),
    "GPT-Neo": (
        "GPTNeo",
        {
            **{"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 4},
            **dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0),
        },
    ),
    "Mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "GPT-J": ("GPTJ", {**GPT, **NO_DROPOUT, "rotary_dim": 4}),
}


def model_of(family: str) -> torch.nn.Module:
    kind, options = FAMILIES[family]
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**options)
    torch.manual_seed(0)
    model: Any = getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    if kind == "Mixtral":
        model.set_experts_implementation("grouped_mm")
    trained: torch.nn.Module = model.train()
    return trained


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.every(4)
def test_a_family_trains_as_it_is(family: str) -> None:
    fn, params = fp.functional(model_of(family))
    tokens = torch.randint(3, 64, (4, 8), generator=torch.Generator().manual_seed(0))

    def loss(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = fn(params, input_ids=tokens, labels=tokens, use_cache=False).loss
        return value

    assert_equivalent(loss, fp.zero(3, "data"), Mesh(data=2), params, tokens, draw=False, rtol=1e-4)


def test_the_page_names_the_families() -> None:
    listed = re.search(r"<!-- families -->\n(.*?)\n<!-- end of families -->", PAGE.read_text(), re.DOTALL)
    assert listed is not None and " ".join(listed.group(1).split()) == ", ".join(FAMILIES) + "."
