"""Classifiers of sequences take each sample's last token, `logits[torch.arange(B), last]`, under every kind of plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, rules

from .test_hugging_face import SMALL, Batch, loss_of, tokens

transformers = pytest.importorskip("transformers")


def classifier(name: str, layers: int) -> tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor], Batch]:
    torch.manual_seed(0)
    if name == "llama":
        sizes = {**SMALL, "num_hidden_layers": layers}
        config = transformers.LlamaConfig(
            vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, num_labels=4, pad_token_id=0, **sizes
        )
        model = transformers.LlamaForSequenceClassification(config)
    else:
        rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=layers, n_head=4, n_positions=32, num_labels=4, pad_token_id=0, **rates
        )
        model = transformers.GPT2ForSequenceClassification(config)
    ids = tokens().clamp(min=1)
    ids[1, 5:] = 0
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([1, 0, 3, 2])}
    return *loss_of(model.double().train(), True), batch


PLANS: dict[str, tuple[Any, Mesh]] = {
    "llama data": (fp.data_parallel("data"), Mesh(data=2)),
    "llama zero": (fp.zero(3, "data"), Mesh(data=2)),
    "llama tensor": (
        fp.chain(fp.tensor_parallel("tensor", rules.llama("tensor")), fp.data_parallel("data")),
        Mesh(data=2, tensor=2),
    ),
    "llama pipe": (fp.pipeline("pipe", microbatches=2), Mesh(pipe=2)),
    "gpt2 data": (fp.data_parallel("data"), Mesh(data=2)),
    "gpt2 pipe": (fp.chain(fp.data_parallel("data"), fp.pipeline("pipe", microbatches=2)), Mesh(pipe=2, data=2)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_that_of_one_device_and_gathers_no_activation(name: str) -> None:
    loss, params, batch = classifier(name.split()[0], layers=2 if "pipe" in name else 1)
    plan, mesh = PLANS[name]
    gradients, want = fp.grad_and_value(loss)(params, batch)
    step = fp.compile(fp.grad_and_value(plan(loss)), mesh)
    found, value = step(params, batch)
    assert abs(value - want) < 1e-12 * abs(want)
    for path in params:
        torch.testing.assert_close(found[path], gradients[path], rtol=1e-10, atol=1e-12)
    if "pipe" not in name:
        gathers = [one for one in step.program.collectives() if one.kind == "all_gather"]
        assert not [one for one in gathers if not one.operand.dtype.is_floating_point or "zero" not in name]
