"""Mixture-of-experts models of transformers, with the experts that it takes by default, `grouped_mm`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import TracingError
from sharding_specs import Mesh

from .test_hugging_face import loss_of, tokens

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}
BATCH = {"input_ids": tokens(), "labels": tokens()}


def mixture(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "mixtral":
        config = transformers.MixtralConfig(
            intermediate_size=24, num_local_experts=4, output_router_logits=True, **SMALL
        )
        return transformers.MixtralForCausalLM(config).train()
    sizes = {"intermediate_size": 24, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(num_experts=4, **sizes, **SMALL)).train()


PLANS: dict[str, tuple[Any, Mesh]] = {
    "no plan": (None, Mesh()),
    "data": (fp.data_parallel("data", strict=True), Mesh(data=2)),
    "zero": (fp.zero(3, "data"), Mesh(data=2)),
}


@pytest.mark.parametrize(("name", "plan"), [("mixtral", plan) for plan in PLANS] + [("qwen", "data")])
def test_loss_and_gradients_are_those_of_eager_torch(name: str, plan: str) -> None:
    model = mixture(name)
    loss, params = loss_of(model, False)
    leaves = {path: x.clone().requires_grad_() for path, x in params.items()}
    want = loss(leaves, BATCH)
    want.backward()
    train = fp.train_step(loss, fp.optim.sgd(1.0), PLANS[plan][1], PLANS[plan][0])
    state, metrics = train(train.init(params), BATCH)
    torch.testing.assert_close(metrics.loss, want.detach(), rtol=1e-5, atol=1e-6)
    for path, after in train.params(state).items():
        torch.testing.assert_close(after, params[path] - leaves[path].grad, rtol=1e-5, atol=1e-5)


def test_a_loop_over_experts_is_refused_with_the_switch() -> None:
    model = mixture("mixtral")
    model.set_experts_implementation("eager")
    loss, params = loss_of(model, False)
    step = fp.compile(fp.grad_and_value(fp.data_parallel("data")(loss)), Mesh(data=2))
    with pytest.raises(TracingError, match=r"model\.set_experts_implementation\('grouped_mm'\)"):
        step(params, BATCH)
