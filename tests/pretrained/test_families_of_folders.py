"""A folder, five steps on a mesh, and a folder again: transformers computes the logits of its own training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, rules
from tests.models.families import CAUSAL, FAMILIES

from .bags import config_of, model_of

transformers = pytest.importorskip("transformers")

MESH = Mesh(data=2, tensor=2)


def over_both(model: torch.nn.Module) -> fp.Plan:
    return fp.chain(fp.tensor_parallel("tensor", rules.for_model(model, mesh=MESH)), fp.zero(3, "data"))


MESHES: dict[str, tuple[Mesh, Callable[[Any], Any]]] = {
    "tensor": (MESH, over_both),
    "pipe": (Mesh(pipe=2, data=2), lambda _: fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2))),
}


@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.every(13)
def test_training_between_two_folders(family: str, on: str, tmp_path: Path) -> None:
    model, batch = model_of(family)
    model.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    mesh, plan_of = MESHES[on]
    fn, params = fp.load_pretrained(tmp_path / "in", mesh, plan_of)
    if FAMILIES[family].experts:
        fn.module.set_experts_implementation("batched_mm")  # streams through a pipeline
    fn.module.train()

    def loss(params: Any, batch: Any) -> torch.Tensor:
        value: torch.Tensor = fn(params, **batch, use_cache=False).loss
        return value

    train = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, plan_of(fn.module))
    state = train.init(params, batch=batch)
    for _ in range(5):
        state, _ = train(state, batch)
    fp.save_pretrained(state, tmp_path / "out", fn)
    read, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
    with torch.no_grad():
        wanted, found = (each.eval()(**batch, use_cache=False).logits for each in (model, read))
    assert (wanted - found).abs().max() <= 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.every(3)
def test_a_folder_through_the_ranks_is_the_same_model(family: str, tmp_path: Path) -> None:
    """Parameters are equal to the bit, and the files have the names and values of transformers' own."""
    model, _ = model_of(family)
    model.save_pretrained(tmp_path / "in")
    fn, params = fp.load_pretrained(tmp_path / "in", MESH, over_both)
    _, wanted = fp.functional(model)
    full = params.full()
    assert full.keys() == wanted.keys()
    assert all(torch.equal(full[name], wanted[name]) for name in wanted)
    buffers = dict(fn.module.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    fp.save_pretrained(params, tmp_path / "out", fn)
    theirs, ours = (_tensors(tmp_path / name) for name in ("in", "out"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in theirs)
    type(model).from_pretrained(tmp_path / "in").save_pretrained(tmp_path / "theirs")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "out")]
    assert configs[0] == configs[1]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: x for each in folder.glob("*.safetensors") for key, x in load_file(each).items()}


def test_tied_weights_are_one_leaf_and_one_tensor(tmp_path: Path) -> None:
    config = config_of("Llama", tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "in")
    fn, params = fp.load_pretrained(tmp_path / "in", Mesh(data=2), fp.zero(3, "data"))
    assert "lm_head.weight" not in params.shapes and "model.embed_tokens.weight" in params.shapes
    fp.save_pretrained(params, tmp_path / "out", fn)
    assert "lm_head.weight" not in _tensors(tmp_path / "out")
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight.shape == (64, 32)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_weight_that_the_files_have_twice(is_same: bool, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config = config_of("Llama", tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tensors = _tensors(tmp_path)
    other = tensors["model.embed_tokens.weight"].clone()
    other[-1] += 0 if is_same else 1
    save_file({**tensors, "lm_head.weight": other}, tmp_path / "model.safetensors", {"format": "pt"})
    if is_same:
        _, params = fp.load_pretrained(tmp_path, Mesh(data=2), fp.zero(3, "data"))
        assert torch.equal(params.full()["model.embed_tokens.weight"], other)
    else:
        with pytest.raises(fp.errors.CheckpointError, match=r"tied weight, and lm_head.weight and model.embed_tokens"):
            fp.load_pretrained(tmp_path, Mesh(data=2), fp.zero(3, "data"))


def test_reads_convert_to_a_dtype(tmp_path: Path) -> None:
    model, _ = model_of("Qwen3")
    model.save_pretrained(tmp_path / "in")
    fn, params = fp.load_pretrained(tmp_path / "in", Mesh(data=2), fp.zero(3, "data"), dtype=torch.bfloat16)
    wanted = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    assert all(torch.equal(x, wanted[name]) and x.dtype == torch.bfloat16 for name, x in params.full().items())
    fp.save_pretrained(params, tmp_path / "out", fn)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_folder_of_the_base_model_loads_into_a_class_with_a_head(tmp_path: Path) -> None:
    """Its names lack the base model's prefix; a tied head needs no weight of its own."""
    config = config_of("GPT-2")
    base = transformers.GPT2Model(config)
    base.save_pretrained(tmp_path)
    _, params = fp.load_pretrained(tmp_path, Mesh(), model_class=transformers.GPT2LMHeadModel)
    assert torch.equal(params.full()["transformer.wte.weight"], base.wte.weight)


def test_files_beside_the_weights_are_kept(tmp_path: Path) -> None:
    model_of("Llama")[0].save_pretrained(tmp_path / "in")
    kept = {"tokenizer.json": "{}", "merges.txt": "a b", "generation_config.json": '{"top_k": 7}'}
    for name, text in {**kept, "training_args.bin": "x"}.items():
        (tmp_path / "in" / name).write_text(text)
    fn, params = fp.load_pretrained(tmp_path / "in", Mesh())
    assert fn.module.generation_config.top_k == 7
    fp.save_pretrained(params.full(), tmp_path / "out", fn)
    assert {name: (tmp_path / "out" / name).read_text() for name in kept} == kept
    assert not (tmp_path / "out" / "training_args.bin").exists()


def test_a_conversion_that_is_not_known_by_boxes_is_read_in_full(tmp_path: Path) -> None:
    from transformers import conversion_mapping, core_model_loading

    class Doubled(core_model_loading.ConversionOps):  # type: ignore[misc]
        def convert(self, input_dict: Any, target_patterns: list[str], **_: Any) -> dict[str, Any]:
            ((tensors,),) = [input_dict.values()]
            return {target_patterns[0]: tensors[0] * 2}

        @property
        def reverse_op(self) -> Any:
            raise NotImplementedError

    name, op = "model.norm.weight", core_model_loading.WeightConverter("norm_of_all", "model.norm.weight", [Doubled()])
    model_of("Llama")[0].save_pretrained(tmp_path)
    from safetensors.torch import save_file

    tensors = _tensors(tmp_path)
    norm = tensors.pop(name)
    save_file({**tensors, "norm_of_all": norm}, tmp_path / "model.safetensors", {"format": "pt"})
    conversion_mapping.register_checkpoint_conversion_mapping("llama", [op], overwrite=True)
    try:
        with pytest.warns(RuntimeWarning, match=rf"{name}: each rank reads 1 tensors? in full, .* Doubled"):
            _, params = fp.load_pretrained(tmp_path, Mesh(data=2), fp.zero(3, "data"))
        assert torch.equal(params.full()[name], norm * 2)
    finally:
        conversion_mapping._checkpoint_conversion_mapping_cache.pop("llama")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("fills", [True, False])
def test_adapters_beside_the_weights_of_a_folder(fills: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, batch = model_of("Llama")
    model.save_pretrained(tmp_path / "in")

    def adapt(model: Any) -> Any:
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        for layer in adapted.modules():
            if fills and isinstance(layer, peft.tuners.lora.LoraLayer):
                layer.lora_A.to_empty(device="cpu")
                layer.lora_B.to_empty(device="cpu")
                layer.reset_lora_parameters("default", init_lora_weights=True)
        return adapted.requires_grad_(True)

    if not fills:
        with pytest.raises(ValueError, match=r"made parameters that have no values:\n  \S+lora_A\S+\n"):
            fp.load_pretrained(tmp_path / "in", MESH, over_both, adapt=adapt)
        return
    fn, params = fp.load_pretrained(tmp_path / "in", MESH, over_both, adapt=adapt)
    full, own = params.full(), dict(fn.module.named_parameters())
    base = {name: x for name, x in full.items() if "lora_" not in name}
    assert sorted(map(float, map(torch.sum, base.values()))) == sorted(
        float(x.detach().sum()) for x in model.parameters()
    )
    assert len(full) > len(base) and all(torch.equal(full[name], own[name]) for name in full.keys() - base.keys())
    with torch.no_grad():
        wanted = model.eval()(**batch, use_cache=False).logits
        assert (fn(full, **batch, use_cache=False).logits - wanted).abs().max() < 1e-6
    with pytest.raises(TypeError, match="fn is no function of a model of transformers, but of PeftModel"):
        fp.save_pretrained(params, tmp_path / "out", fn)
