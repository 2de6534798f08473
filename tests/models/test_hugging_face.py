"""Unmodified Hugging Face models, sharded by the ready path rules alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, apply_rules, rules

from .families import Batch, KeepDouble, labels, loss_of, tokens

transformers = pytest.importorskip("transformers")

MESH = Mesh(data=2, tensor=2)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> tuple[torch.nn.Module, Batch]:
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, **SMALL)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens(), "labels": labels()}


def gpt2(dropout: float = 0.0, layers: int = 2) -> tuple[torch.nn.Module, Batch]:
    rates = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=layers, n_head=4, n_positions=32, **rates)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens(), "labels": labels()}


def bert() -> tuple[torch.nn.Module, Batch]:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=32, **rates, **SMALL)
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return transformers.BertForMaskedLM(config), {"input_ids": tokens(), "labels": labels(), "attention_mask": mask}


def vit() -> tuple[torch.nn.Module, Batch]:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=8, **rates, **SMALL)
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.arange(4)}


MODELS: dict[str, tuple[Callable[[], tuple[torch.nn.Module, Batch]], dict[str, Any]]] = {
    "llama": (llama, rules.llama("tensor")),
    "gpt2": (gpt2, rules.gpt2("tensor")),
    "bert": (bert, rules.bert("tensor")),
    "vit": (vit, rules.vit("tensor")),
}


def plan_for(name: str) -> Any:
    return fp.chain(fp.tensor_parallel("tensor", MODELS[name][1], strict=True), fp.data_parallel("data", strict=True))


def setup(name: str, dtype: torch.dtype) -> tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor], Batch]:
    torch.manual_seed(0)
    model, batch = MODELS[name][0]()
    model = model.to(dtype).train()
    batch = {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
    return *loss_of(model, dtype == torch.float64), batch


@cache
def compiled(name: str, dtype: torch.dtype) -> Any:
    """The gradients of a model, once for all tests."""
    return fp.compile(fp.grad_and_value(plan_for(name)(setup(name, dtype)[0])), MESH)


BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name: str) -> None:
    """As on one device; `strict` refuses every op that would be computed whole for want of a rule."""
    assert_right(name, torch.float64)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(4)
def test_loss_and_gradients_of_a_model_as_it_is(name: str) -> None:
    """In float32, with all its casts."""
    assert_right(name, torch.float32)


def assert_right(name: str, dtype: torch.dtype) -> None:
    bound = BOUNDS[dtype]
    loss, params, batch = setup(name, dtype)
    want_grads, want = fp.grad_and_value(loss)(params, batch)
    grads, value = compiled(name, dtype)(params, batch)
    assert abs(value - want) <= bound * abs(want)
    unused = {path for path, gradient in want_grads.items() if not gradient.any()}
    for path in params:
        largest = want_grads[path].abs().max()
        if largest < 1e-7 and path.endswith(("k_proj.bias", "key.bias")):
            continue  # a bias of keys shifts all scores of a query alike: its gradient is rounding alone
        assert (grads[path] - want_grads[path]).abs().max() <= bound * largest, path
    assert len(unused) < len(params) / 4


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_not_gathered(name: str) -> None:
    """The one gather allowed is of BERT's boolean mask, with which it indexes."""
    _, params, batch = setup(name, torch.float64)
    program = compiled(name, torch.float64).lower(params, batch)
    gathers = [one for one in program.collectives() if one.kind == "all_gather"]
    assert all(not one.operand.dtype.is_floating_point for one in gathers)
    sums = [one for one in program.collectives() if one.kind == "psum" and one.axes == ("tensor",)]
    assert all(one.operand.shape[-1:] != (64,) or one.operand.ndim < 2 for one in sums if not one.backward)


@pytest.mark.parametrize("name", MODELS)
def test_the_ready_rules_name_parameters_that_exist(name: str) -> None:
    _, params, _ = setup(name, torch.float32)
    specs = apply_rules(MODELS[name][1], params)
    split = [path for path, spec in specs.items() if spec.axes]
    assert len(split) >= 2 * 6


def test_tied_weights_are_one_leaf() -> None:
    _, params, _ = setup("gpt2", torch.float32)
    assert "transformer.wte.weight" in params and "lm_head.weight" not in params


def test_dropout_is_the_same_on_every_mesh() -> None:
    torch.manual_seed(0)
    model, batch = gpt2(dropout=0.2, layers=1)
    fn, params = fp.functional(model.double().train())

    def loss(params: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        with KeepDouble():
            return fn(params, **batch).loss

    tensor = fp.tensor_parallel("tensor", MODELS["gpt2"][1])
    found = []
    for plan, mesh in (
        (None, Mesh()),
        (fp.data_parallel("data"), Mesh(data=2)),
        (fp.chain(tensor, fp.data_parallel("data")), MESH),
    ):
        train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan, seed=5)
        _, metrics = train(train.init(params), batch)
        found.append(metrics.loss)
    assert all(abs(found[0] - each) < 1e-12 for each in found[1:])
    assert abs(found[0] - loss_of(model.eval(), True)[0](params, batch)) > 1e-4
