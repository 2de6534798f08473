"""Ready rules split a model with LoRA as they split it without, by the names that peft gives to parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P, apply_rules, bytes_per_rank, rules

HIDDEN, HEADS, VOCABULARY, RANK = 8, 4, 12, 2
MESH = Mesh(tensor=2)
LAYER = "base_model.model.model.layers.0"


def names_of_peft() -> dict[str, Tensor]:
    """Parameters of a Llama of one layer with LoRA on every linear layer and the embedding, as peft names them."""
    draw = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randint(-2, 3, shape, generator=draw).double()  # noqa: E731
    found = {"base_model.model.model.embed_tokens.base_layer.weight": make(VOCABULARY, HIDDEN)}
    found["base_model.model.model.embed_tokens.lora_embedding_A.default"] = make(RANK, VOCABULARY)
    found["base_model.model.model.embed_tokens.lora_embedding_B.default"] = make(HIDDEN, RANK)
    shapes = {f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (16, HIDDEN), "mlp.up_proj": (16, HIDDEN), "mlp.down_proj": (HIDDEN, 16)}
    for name, (out, taken) in shapes.items():
        found[f"{LAYER}.{name}.base_layer.weight"] = make(out, taken)
        found[f"{LAYER}.{name}.lora_A.default.weight"] = make(RANK, taken)
        found[f"{LAYER}.{name}.lora_B.default.weight"] = make(out, RANK)
    found[f"{LAYER}.input_layernorm.weight"] = make(HIDDEN)
    found["base_model.model.lm_head.weight"] = make(VOCABULARY, HIDDEN)
    return found


def loss(p: dict[str, Tensor], ids: Tensor) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        path = f"{LAYER}.{name}"
        low = F.linear(x, p[f"{path}.lora_A.default.weight"])
        return F.linear(x, p[f"{path}.base_layer.weight"]) + F.linear(low, p[f"{path}.lora_B.default.weight"])

    table = "base_model.model.model.embed_tokens"
    low = F.embedding(ids, p[f"{table}.lora_embedding_A.default"].T)
    x = F.embedding(ids, p[f"{table}.base_layer.weight"]) + low @ p[f"{table}.lora_embedding_B.default"].T
    x = x * p[f"{LAYER}.input_layernorm.weight"]
    q, k, v = (linear(f"self_attn.{name}_proj", x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")
    mixed = (q * k * v).transpose(1, 2).flatten(2)  # of each head by itself
    x = x + linear("self_attn.o_proj", mixed)
    x = x + linear("mlp.down_proj", linear("mlp.gate_proj", x) * linear("mlp.up_proj", x))
    return F.linear(x, p["base_model.model.lm_head.weight"]).sum()


IDS = torch.tensor([[1, 5, 11], [0, 7, 3]])


def test_the_split_of_a_model_with_lora() -> None:
    """Each rank held 93 % of the bytes, and strict=True found nothing to say, as '*' took them all."""
    found = names_of_peft()
    specs = apply_rules(rules.llama("tensor"), found, strict=True)
    columns = [f"{LAYER}.self_attn.{name}_proj" for name in "qkv"] + [f"{LAYER}.mlp.{x}_proj" for x in ("gate", "up")]
    for layer in columns:
        assert specs[f"{layer}.base_layer.weight"] == specs[f"{layer}.lora_B.default.weight"] == P("tensor")
        assert specs[f"{layer}.lora_A.default.weight"] == P()
    for layer in (f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.down_proj"):
        assert specs[f"{layer}.base_layer.weight"] == specs[f"{layer}.lora_A.default.weight"] == P(None, "tensor")
        assert specs[f"{layer}.lora_B.default.weight"] == P()
    assert specs["base_model.model.lm_head.weight"] == P("tensor")
    assert specs["base_model.model.model.embed_tokens.lora_embedding_A.default"] == P(None, "tensor")
    whole = sum(leaf.numel() * leaf.element_size() for leaf in found.values())
    assert bytes_per_rank(found, specs, Mesh(tensor=4)) < 0.4 * whole


def test_sums_and_no_gather() -> None:
    plan = fp.tensor_parallel("tensor", rules.llama("tensor"), strict=True)
    step = fp.testing.assert_equivalent(loss, plan, MESH, names_of_peft(), IDS)
    kinds = [one.kind for one in step.program.collectives()]
    assert set(kinds) == {"psum"}
    forward = [one.operand.shape[-1] for one in step.program.collectives() if not one.backward and one.operand.shape]
    assert sorted(forward) == [RANK, RANK, HIDDEN, HIDDEN, HIDDEN]  # embedding, attention and MLP, and two of the rank


GPT2 = {
    "base_model.model.transformer.h.0.attn.c_attn.base_layer.weight": ((8, 24), P(None, (3, "tensor"))),
    "base_model.model.transformer.h.0.attn.c_attn.base_layer.bias": ((24,), P((3, "tensor"))),
    "base_model.model.transformer.h.0.attn.c_attn.lora_A.default.weight": ((2, 8), P()),
    "base_model.model.transformer.h.0.attn.c_attn.lora_B.default.weight": ((24, 2), P((3, "tensor"))),
    "base_model.model.transformer.h.0.attn.c_proj.lora_A.default.weight": ((2, 8), P(None, "tensor")),
    "base_model.model.transformer.h.0.attn.c_proj.lora_B.default.weight": ((8, 2), P()),
    "base_model.model.transformer.h.0.mlp.c_fc.lora_A.other.weight": ((2, 8), P()),
    "base_model.model.transformer.h.0.mlp.c_fc.lora_B.other.weight": ((32, 2), P("tensor")),
    "base_model.model.transformer.wte.lora_embedding_A.default": ((2, 12), P(None, "tensor")),
    "base_model.model.transformer.wte.lora_embedding_B.default": ((8, 2), P()),
    "base_model.model.lm_head.modules_to_save.default.weight": ((12, 8), P("tensor")),
    "base_model.model.lm_head.lora_B.default.weight": ((12, 2), P("tensor")),
}
OTHERS: list[tuple[dict[str, P], str, P]] = [
    (rules.bert(), "base_model.model.bert.encoder.layer.0.attention.self.query.lora_B.default.weight", P("tensor")),
    (rules.bert(), "base_model.model.bert.encoder.layer.0.output.dense.base_layer.weight", P(None, "tensor")),
    (rules.bert(), "base_model.model.bert.encoder.layer.0.output.dense.lora_A.default.weight", P(None, "tensor")),
    (rules.bert(), "base_model.model.cls.predictions.transform.dense.weight", P()),
    (rules.vit(), "base_model.model.vit.encoder.layer.0.attention.attention.query.base_layer.bias", P("tensor")),
    (rules.vit(), "base_model.model.vit.encoder.layer.0.intermediate.dense.lora_B.default.weight", P("tensor")),
    (rules.llama(), "lm_head.weight", P("tensor")),
    (rules.gpt2(), "lm_head.weight", P("tensor")),
]


def test_the_other_models() -> None:
    found = apply_rules(rules.gpt2(), {name: torch.empty(shape) for name, (shape, _) in GPT2.items()}, strict=True)
    assert found == {name: spec for name, (_, spec) in GPT2.items()}
    for each, name, spec in OTHERS:
        assert apply_rules(each, {name: 0})[name] == spec, name


# --- Rules that leave most bytes replicated ---


def mostly(specs: Any, params: dict[str, Tensor], f: Callable[..., Tensor]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = fp.compile(fp.grad(fp.tensor_parallel("tensor", specs)(f)), MESH)
        for _ in range(2):
            step(params, torch.ones(2, 4))
    return [str(each.message) for each in caught]


def of_two(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ p["inner.first"] @ p["inner.second"]).sum()


def test_rules_that_leave_most_bytes_replicated() -> None:
    small = {"inner.first": torch.ones(4, 8192), "inner.second": torch.ones(8192, 36)}
    for rest in ({"*": P()}, {}):
        (said,) = mostly({"*/first": P(None, "tensor"), **rest}, small, of_two)
        assert (
            "tensor_parallel('tensor'): the rules leave 90% of the bytes of the parameters replicated over 'tenso"
            in said
        )
        assert "no pattern but '*' matches inner.second. Give rules for them" in said
    assert mostly({"*/first": P(None, "tensor"), "*/second": P()}, small, of_two) == []  # said on purpose
    assert mostly({"*/first": P(), "*": P()}, small, of_two) == []  # no rule is for the axis
    assert mostly({"inner.first": P(None, "tensor"), "inner.second": P("tensor")}, small, of_two) == []
    even = {"inner.first": torch.ones(4, 1 << 16), "inner.second": torch.ones(1 << 16, 4)}
    tiny = {"inner.first": torch.ones(4, 4), "inner.second": torch.ones(4, 36)}
    for params in (even, tiny):
        assert mostly({"*/first": P(None, "tensor"), "*": P()}, params, of_two) == []


# --- peft itself ---


@pytest.mark.filterwarnings("ignore")
def test_peft_gives_these_names() -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double()
    layers = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=[*layers, "embed_tokens"]))
    for name, each in adapted.named_parameters():
        each.requires_grad_(True)
        if "lora_" in name:
            torch.nn.init.normal_(each)
    fn, params = fp.functional(adapted)
    specs = apply_rules(rules.llama("tensor"), params, strict=True)
    whole = {name for name, spec in specs.items() if not spec.axes}
    assert all("norm" in name or "_A" in name or "_B" in name for name in whole)

    def of_model(params: Any, ids: Tensor) -> Tensor:
        return fn(params, input_ids=ids, labels=ids, use_cache=False).loss

    plan = fp.tensor_parallel("tensor", rules.llama("tensor"))
    ids = torch.randint(0, 32, (2, 6))
    grads, value = fp.compile(fp.grad_and_value(plan(of_model)), MESH)(params, ids)
    wanted, expected = torch.func.grad_and_value(of_model)(params, ids)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grads, wanted)
