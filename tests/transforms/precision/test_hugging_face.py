"""A Hugging Face model in mixed precision: its masks, casts and norms written for other ways of doing it."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

from . import networks

transformers = pytest.importorskip("transformers")

CONFIG = transformers.LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)


@pytest.mark.parametrize(("kind", "dtype", "bound"), [("bf16", torch.bfloat16, 0.02), ("fp16", torch.float16, 0.01)])
def test_a_llama_computes_its_products_narrow(kind: str, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    fn, params = fp.functional(transformers.LlamaForCausalLM(CONFIG).eval())
    tokens = torch.randint(0, 64, (4, 16))

    def loss(params: Any, tokens: Tensor) -> Tensor:
        return fn(params, input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    plan = fp.chain(fp.mixed_precision(kind), fp.zero(3, "data"))
    step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(data=2))
    wide = optree.tree_leaves(fp.grad_and_value(loss)(params, tokens))
    for a, b in zip(optree.tree_leaves(step(params, tokens)), wide, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() <= bound * b.norm()
    assert networks.types_of(step.program, "mm", "bmm") == {dtype}
    gathered = {each.operand.dtype for each in step.program.collectives() if each.kind == "all_gather"}
    assert gathered == {dtype}
