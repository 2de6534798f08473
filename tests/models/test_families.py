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

from . import families

transformers = pytest.importorskip("transformers")

PAGE = ROOT / "docs" / "hugging_face.md"
GPT_J: dict[str, Any] = {**families.GPT, **families.NO_DROPOUT, "rotary_dim": 4}
FAMILIES = [
    *("Llama", "Qwen3", "Mistral", "Gemma3", "Phi3", "OLMo2", "GPT-NeoX", "Falcon", "OPT", "GPT-2", "GPT-Neo"),
    *("Mixtral", "GPT-J"),
]


def model_of(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if family == "GPT-J":
        made: torch.nn.Module = transformers.GPTJForCausalLM(transformers.GPTJConfig(**GPT_J))
    else:
        made, _ = families.made(family)
    return made.float().train()


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
