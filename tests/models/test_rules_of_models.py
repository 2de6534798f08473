"""`rules.for_model`: rules of families of transformers without writing them, from a plan or from the table."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, SpecError, apply_rules, rules
from sharding_specs.errors import SpecWarning
from tests.hugging_face_page import PAGE, rows_of

from .families import FAMILIES, GROUPED, made
from .of_rules import bound_of, measured, source_of

transformers = pytest.importorskip("transformers")

SAMPLE = ("OLMo2", "Phi3", "T5")
KINDS = ("data", "zero", "pipe")


def assert_right(family: str, kind: str) -> None:
    found = measured(family, kind)
    assert found.error <= bound_of(family)
    assert found.compared > 0.8 * found.parameters
    assert found.gathers == 0
    _, source, share, gathers, _ = rows_of(PAGE.read_text())[family]
    assert (source, share, gathers) == (source_of(family), f"{found.share:.0%}", "0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", SAMPLE)
def test_loss_and_gradients(family: str, kind: str) -> None:
    assert_right(family, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SAMPLE])
def test_loss_and_gradients_of_the_other_families(family: str, kind: str) -> None:
    assert_right(family, kind)


def test_the_page_has_every_family() -> None:
    assert list(rows_of(PAGE.read_text())) == list(FAMILIES)


# --- Names of a model's parameters ---


def of(kind: str, **options: Any) -> Any:
    config = transformers.LlamaConfig(**{**GROUPED, **options})
    return getattr(transformers, kind)(config)


def test_a_model_without_values_has_the_same_rules() -> None:
    with torch.device("meta"):
        hollow = of("LlamaForCausalLM")
    assert rules.for_model(hollow) == rules.for_model(of("LlamaForCausalLM"))
    assert fp.rules.for_model is rules.for_model


def test_heads_and_backbones() -> None:
    layer = "layers/*/self_attn/q_proj/weight"
    for kind, pattern in (
        ("LlamaModel", layer),
        ("LlamaForSequenceClassification", f"model/{layer}"),
        ("LlamaForTokenClassification", f"model/{layer}"),
    ):
        model = of(kind)
        found = rules.for_model(model, "t")
        specs = apply_rules(found, dict(model.named_parameters()), strict=True)
        assert found[pattern] == P("t"), kind
        assert {spec for name, spec in specs.items() if "norm" in name or "score" in name} == {P()}


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_of_peft(frozen: bool) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(of("LlamaForCausalLM"), peft.LoraConfig(r=2, target_modules=["k_proj", "down_proj"]))
    adapted.requires_grad_(True) if not frozen else None
    found = rules.for_model(adapted, mesh=Mesh(tensor=2))
    specs = apply_rules(found, dict(adapted.named_parameters()), strict=True)
    base = "base_model.model.model.layers.1"
    assert specs[f"{base}.self_attn.k_proj.base_layer.weight"] == P("tensor")
    assert specs[f"{base}.self_attn.k_proj.lora_B.default.weight"] == P("tensor")
    assert specs[f"{base}.mlp.down_proj.lora_A.default.weight"] == P(None, "tensor")
    assert specs[f"{base}.self_attn.q_proj.weight"] == P("tensor")
    assert specs["base_model.model.lm_head.weight"] == P("tensor")
    apply_rules(found, fp.functional(adapted)[1], strict=True)  # frozen parameters are in no rule that must match


def test_tied_tables_are_one_leaf() -> None:
    for family, name in (("T5", "shared.weight"), ("Gemma", "model.embed_tokens.weight"), ("BERT", None)):
        model, _ = made(family)
        _, params = fp.functional(model)
        specs = apply_rules(rules.for_model(model), params, strict=True)
        tables = [path for path, x in params.items() if x.shape[0] == 64 and x.ndim == 2 and "proj" not in path]
        assert not any("lm_head" in path or "decoder.weight" in path for path in tables)
        assert all(specs[path] == P("tensor") for path in ([name] if name else tables)), tables


# --- What the axis does not divide ---


def test_fewer_heads_of_keys_than_ranks() -> None:
    """The keys and values are replicated; the queries stay split, and nothing is gathered."""
    model, batch = made("Llama")
    mesh = Mesh(tensor=4)
    text = r"self_attn/k_proj/weight \(2 heads\), .*v_proj/weight \(2 heads\)"
    with pytest.warns(SpecWarning, match="'tensor' of 4 ranks does not divide.*" + text):
        found = rules.for_model(model, mesh=mesh)
    assert "model/layers/*/self_attn/k_proj/weight" not in found
    assert found["model/layers/*/self_attn/q_proj/weight"] == P("tensor")
    fn, params = fp.functional(model.float())

    def loss(params: dict[str, torch.Tensor], **batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = fn(params, **batch).loss
        return value

    step = fp.compile(fp.grad_and_value(fp.tensor_parallel("tensor", found)(loss)), mesh)
    grads, value = step(params, **batch)
    wanted, expected = fp.grad_and_value(loss)(params, **batch)
    torch.testing.assert_close((value, grads), (expected, wanted), rtol=1e-4, atol=1e-6)
    assert not [one for one in step.lower(params, **batch).collectives() if one.kind == "all_gather"]


def test_heads_that_do_not_divide() -> None:
    """An attention of 3 heads on 2 ranks is replicated with its output, and its LoRA matrices; the rest is split."""
    peft = pytest.importorskip("peft")
    options = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "head_dim": 16, "vocab_size": 63}
    model = peft.get_peft_model(of("LlamaForCausalLM", **options), peft.LoraConfig(target_modules=["q_proj", "o_proj"]))
    with pytest.warns(SpecWarning) as said:
        found = rules.for_model(model.requires_grad_(True), mesh=Mesh(tensor=2))
    assert not [name for name in found if "self_attn" in name or "lm_head" in name]
    assert [name for name in found if "mlp" in name]
    (text,) = [str(each.message) for each in said]
    assert "q_proj/base_layer/weight (3 heads)" in text and "embed_tokens/weight (dim 0 of size 63)" in text
    assert "o_proj/base_layer/weight (its attention is replicated)" in text


def test_falcon_with_one_head_of_keys() -> None:
    model = transformers.FalconForCausalLM(transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1,
                                                                     num_attention_heads=4))  # fmt: skip
    with pytest.warns(SpecWarning, match=r"query_key_value/weight \(1 heads\), .*dense/weight \(its attention is"):
        found = rules.for_model(model, mesh=Mesh(tensor=2))
    assert not any("self_attention" in name for name in found) and any("mlp" in name for name in found)


# --- Unknown ---


def test_a_family_that_is_not_known() -> None:
    with torch.device("meta"):
        model = transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
        )
    text = "MambaForCausalLM of model type 'mamba' has no `_tp_plan`, and is not in the table of families (bart, "
    with pytest.raises(SpecError, match=re.escape(text) + ".*write rules, path patterns"):
        rules.for_model(model)
    with pytest.raises(TypeError, match=r"for_model\('gpt2'\): the model is an nn.Module"):
        rules.for_model("gpt2")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="Linear of model type 'unknown' has no `_tp_plan`"):
        rules.for_model(torch.nn.Linear(2, 2))


def test_a_style_that_is_not_known() -> None:
    model = of("LlamaForCausalLM")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.up_proj": "spiral"}
    with pytest.warns(SpecWarning, match="the plan of 'llama' has styles .* model.layers.*.mlp.up_proj: 'spiral'"):
        found = rules.for_model(model)
    assert "model/layers/*/mlp/up_proj/weight" not in found


def test_every_style_of_transformers_is_known() -> None:
    styles = pytest.importorskip("transformers.distributed.tensor_parallel").ALL_PARALLEL_STYLES
    model = of("LlamaForCausalLM")
    of_experts = {"grouped_gemm", *(style for style in styles if style.startswith("ep_"))}  # in plans of experts alone
    for style in set(styles) - of_experts:
        model._tp_plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.self_attn.q_proj": style}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rules.for_model(model)


def test_rules_that_match_nothing() -> None:
    model = of("LlamaForCausalLM")
    model._tp_plan = {"transformer.h.*.up": "colwise", "model.embed_tokens": "embedding_rowwise"}
    with pytest.raises(SpecError, match="the rules of 'llama' match no layer of LlamaForCausalLM, whose 21 parameters"):
        rules.for_model(model)


def test_layers_of_one_name_at_two_depths() -> None:
    """A pattern with `*` would match both; the rules then name the paths."""

    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))])
            self._tp_plan = {"layers.0": "colwise"}

    model = Nested()
    found = rules.for_model(model)
    specs = apply_rules(found, dict(model.named_parameters()), strict=True)
    assert {name for name, spec in specs.items() if spec.axes} == {"layers.0.weight", "layers.0.bias"}
