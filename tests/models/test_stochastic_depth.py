"""Models of transformers that draw in their forward: drop path, layer drop, masked patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import TracingError
from sharding_specs import Mesh

from .test_hugging_face import KeepDouble, tokens

transformers = pytest.importorskip("transformers")

OF_ONE = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}


def images() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def convnext() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[4, 8], depths=[1, 1], drop_path_rate=0.5, image_size=8, patch_size=2, num_labels=3
    )
    return transformers.ConvNextForImageClassification(config), {
        "pixel_values": images(),
        "labels": torch.arange(4) % 3,
    }


def masked_patches() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A masked autoencoder, which orders patches by random numbers."""
    config = transformers.ViTMAEConfig(
        image_size=8,
        patch_size=2,
        decoder_num_attention_heads=2,
        decoder_hidden_size=8,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=16,
        mask_ratio=0.5,
        **OF_ONE,
    )
    return transformers.ViTMAEForPreTraining(config), {"pixel_values": images()}


def opt(rate: float) -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=8,
        ffn_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        word_embed_proj_dim=8,
        dropout=0.1,
        layerdrop=rate,
    )
    return transformers.OPTForCausalLM(config), {"input_ids": tokens(), "labels": tokens()}


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, Any]]]] = {
    "drop path": convnext,
    "masked patches": masked_patches,
}
PLANS: dict[str, tuple[Any, Mesh]] = {
    "data": (fp.data_parallel("data"), Mesh(data=2)),
    "microbatches": (fp.accumulate(2), Mesh()),
}


def step_of(model: torch.nn.Module, plan: Any, mesh: Mesh) -> tuple[Any, Any]:
    fn, params = fp.functional(model.double().train())

    def loss(params: Any, batch: dict[str, Any]) -> torch.Tensor:
        with KeepDouble():
            return fn(params, **batch).loss  # type: ignore[no-any-return]

    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan, seed=3)
    return train, train.init(params)


@pytest.mark.parametrize(
    ("name", "plan"), [("drop path", "data"), ("drop path", "microbatches"), ("masked patches", "data")]
)
def test_the_same_draws_on_every_mesh_and_in_microbatches(name: str, plan: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    found = []
    for each, mesh in ((None, Mesh()), PLANS[plan]):
        train, state = step_of(model, each, mesh)
        losses = []
        for _ in range(2):
            state, metrics = train(state, batch)
            losses.append(metrics.loss)
        found.append(torch.stack(losses))
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=0)
    assert found[0][0] != found[0][1]


def test_a_layer_drop_is_refused_with_the_switch() -> None:
    model, batch = opt(0.5)
    train, state = step_of(model, fp.data_parallel("data"), Mesh(data=2))
    with pytest.raises(TracingError, match=r"branches on a random number.*config\.layerdrop = 0"):
        train(state, batch)
