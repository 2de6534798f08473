"""Unmodified models of transformers generate on meshes what `model.generate` does, token by token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel import cli
from sharding_specs import Mesh, rules

from ..processes import run_on_processes

transformers = pytest.importorskip("transformers")

from .models import FAMILIES, PROMPTS, generated_by_transformers, model_of  # noqa: E402

MESHES: dict[str, Mesh] = {"tensor": Mesh(tensor=2), "zero 3": Mesh(data=2), "pipeline": Mesh(pipe=2)}
NEW = 12


def plan_of(kind: str, model: Any) -> Any:
    if kind == "tensor":
        return fp.tensor_parallel("tensor", rules.for_model(model, mesh=MESHES[kind]))
    return fp.zero(3, "data") if kind == "zero 3" else fp.pipeline("pipe", microbatches=1)


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.every(15)
def test_a_model_generates_as_it_is(family: str, kind: str) -> None:
    model = model_of(family)
    fn, params = fp.functional(model)
    found = fp.generate(fn, params, PROMPTS, MESHES[kind], plan_of(kind, model), max_new_tokens=NEW)
    assert torch.equal(found.tokens, generated_by_transformers(model, PROMPTS, NEW))
    assert model.training, "the mode of the model is restored"


@pytest.mark.filterwarnings("ignore::sharding_specs.errors.SpecWarning")
def test_fewer_heads_of_keys_than_ranks_are_replicated() -> None:
    model, mesh = model_of("Llama"), Mesh(tensor=4)
    fn, params = fp.functional(model)
    generator = fp.Generator(fn, mesh, fp.tensor_parallel("tensor", rules.for_model(model, mesh=mesh)))
    found = generator(params, PROMPTS, max_new_tokens=NEW)
    assert torch.equal(found.tokens, generated_by_transformers(model, PROMPTS, NEW))
    decode = generator.programs()["decode"]
    cache = [spec for path, spec in zip(decode.in_paths, decode.in_specs, strict=True) if "cache/layers" in path]
    assert len(cache) == 4 and not any(spec.axes for spec in cache)


def test_a_model_is_priced_without_weights() -> None:
    """Llama-3-8B in bfloat16: 32 rows and a cache of 4,096 tokens on eight ranks."""
    heads = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 8192}
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**heads, **sizes)).to(torch.bfloat16)
    fn, params = fp.functional(model)
    plan = fp.tensor_parallel("tensor", rules.for_model(model, mesh=Mesh(tensor=8)))
    began = time.process_time()
    programs = fp.Generator(fn, Mesh(tensor=8), plan).lower(params, rows=32, prompt=2000, max_new_tokens=2048)
    assert time.process_time() - began < 15
    decode = programs["decode"]
    held = sum(x.numel() for x in params.values()) * 2 / 8
    cache = 2 * 32 * 32 * 8 * 128 * 4096 * 2 / 8
    assert held + cache < decode.memory().peak < 1.05 * (held + cache)
    assert decode.counts() == {("psum", ("tensor",)): 65, ("all_gather", ("tensor",)): 1}
    assert 0.005 < decode.price("h100").seconds < 0.02


def _on_a_rank(rank: int, family: str, kind: str) -> Tensor:
    torch.set_num_threads(1)
    model = model_of(family)
    fn, params = fp.functional(model)
    return fp.generate(fn, params, PROMPTS, MESHES[kind], plan_of(kind, model), max_new_tokens=NEW).tokens


@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.every(45)
def test_a_model_generates_on_processes(family: str, kind: str) -> None:
    wanted = generated_by_transformers(model_of(family), PROMPTS, NEW)
    assert all(torch.equal(found, wanted) for found in run_on_processes(_on_a_rank, 2, family, kind))


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        (Mesh(data=1), fp.zero(3, "data")),
        (Mesh(pipe=2), fp.pipeline("pipe", microbatches=1)),
        (Mesh(data=1, pipe=2), fp.chain(fp.data_parallel("data"), fp.pipeline("pipe", microbatches=1))),
    ],
)
def test_one_prompt_generates_on_any_mesh(mesh: Mesh, plan: Any) -> None:
    model = model_of("Llama")
    found = fp.generate(*fp.functional(model), PROMPTS[:1], mesh, plan, max_new_tokens=NEW)
    assert torch.equal(found.tokens, generated_by_transformers(model, PROMPTS[:1], NEW))


def test_a_row_ends_at_the_end_token_of_the_model() -> None:
    model = model_of("Llama")
    free = generated_by_transformers(model, PROMPTS, NEW)
    end = int(free[0, 3])
    model.generation_config.eos_token_id = end
    found = fp.Generator(model, Mesh(data=1), fp.data_parallel("data"), look_every=1)(
        dict(fp.functional(model)[1]), PROMPTS, max_new_tokens=NEW
    )
    for row, text, length in zip(free, found.tokens, found.lengths.tolist(), strict=True):
        where = (row == end).nonzero().flatten()
        assert length == (int(where[0]) + 1 if len(where) else NEW)
        assert torch.equal(text[:length], row[:length]) and not text[length:].any()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams": ({"num_beams": 4}, "num_beams=4"),
    "several sequences": ({"num_return_sequences": 2}, "num_return_sequences=2"),
    "repetition": ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
    "bad words": ({"bad_words_ids": [[3]]}, r"bad_words_ids=\[\[3\]\]"),
    "first token": ({"forced_bos_token_id": 1}, "forced_bos_token_id=1"),
    "least length": ({"min_new_tokens": 3}, "min_new_tokens=3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_would_change_the_text_are_refused_by_name(case: str) -> None:
    model, (options, message) = model_of("Llama"), REFUSED[case]
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=rf"model.generation_config has {message}, which fp.generate does not do"):
        fp.Generator(model, Mesh(data=1))


def test_other_states_than_keys_and_values_are_refused_by_name() -> None:
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ValueError, match=r"MambaForCausalLM keeps another state than keys and values \(.*mamba"):
        fp.Generator(transformers.MambaForCausalLM(config), Mesh(data=1))
    with pytest.raises(ValueError, match="Linear is not a model of transformers that generates"):
        fp.Generator(torch.nn.Linear(2, 2), Mesh(data=1))


def test_prompts_that_the_model_cannot_read_are_refused() -> None:
    model = model_of("Llama")
    params = fp.functional(model)[1]
    generator = fp.Generator(model, Mesh(data=1))
    with pytest.raises(ValueError, match=r"need 41 positions, and LlamaForCausalLM has max_position_embeddings=32"):
        generator(params, [[3] * 31], max_new_tokens=10)
    with pytest.raises(ValueError, match=r"tokens \[64\], and the vocabulary has 64: 0 … 63"):
        generator(params, [[3, 64]], max_new_tokens=1)
    model.config.pad_token_id = 0
    with pytest.raises(ValueError, match=r"prompt 1 is padded on the right with token 0.*attention_mask"):
        generator(params, torch.tensor([[5, 6], [7, 0]]), max_new_tokens=1)
    with pytest.raises(ValueError, match="prompt 0: the attention mask leaves out tokens between others"):
        generator(params, {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]}, max_new_tokens=1)
    padded = {"input_ids": torch.tensor([[5, 6], [7, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    assert torch.equal(
        generator(params, padded, max_new_tokens=2).tokens, generator(params, [[5, 6], [7]], max_new_tokens=2).tokens
    )


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "pipe=2"])
def test_the_command_continues_a_prompt(mesh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = model_of("Llama")
    model.generation_config.eos_token_id = 63
    model.save_pretrained(tmp_path)
    words = {f"w{index}": index for index in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    prompts = ["w5 w6 w7", "w9"]
    status = cli.main(
        ["generate", str(tmp_path), "--mesh", mesh, "--max-new-tokens", "4"]
        + [word for prompt in prompts for word in ("--prompt", prompt)]
    )
    wanted = [*generated_by_transformers(model_of("Llama"), [[5, 6, 7], [9]], 4)]
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines == [
        p + " ".join(f"w{token}" for token in row.tolist()) for p, row in zip(prompts, wanted, strict=True)
    ]
