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
from functional_parallel.interop.hugging_face.generation import _NOT_BUILT
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


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.every(2)
def test_a_model_is_priced_without_weights(stages: int) -> None:
    """Llama-3-70B in bfloat16: 32 rows and a cache of 4,096 tokens on eight ranks, or on two stages of eight."""
    heads = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    sizes = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "max_position_embeddings": 8192}
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**heads, **sizes)).to(torch.bfloat16)
    fn, params = fp.functional(model)
    mesh = Mesh(tensor=8) if stages == 1 else Mesh(tensor=8, pipe=stages)
    plan = fp.tensor_parallel("tensor", rules.for_model(model, mesh=mesh))
    if stages > 1:
        plan = fp.chain(plan, fp.pipeline("pipe", microbatches=2))
    began = time.process_time()
    programs = fp.Generator(fn, mesh, plan).lower(params, rows=32, prompt=2000, max_new_tokens=2048)
    assert time.process_time() - began < 15 * stages
    prefill, decode = programs["prefill"], programs["decode"]
    held = sum(x.numel() for x in params.values()) * 2 / 8 / stages
    cache = 2 * 80 * 32 * 8 * 128 * 4096 * 2 / 8 / stages
    assert held + cache < decode.memory().peak < 1.05 * (held + cache)
    assert decode.memory().peak < prefill.memory().peak < 1.5 * (held + cache)
    if stages == 1:
        assert decode.counts() == {("psum", ("tensor",)): 161, ("all_gather", ("tensor",)): 1}
    assert (held + cache) / 3.35e12 < decode.price("h100").seconds < 0.06, "above reading memory once"
    flops = 2 * 70e9 * 32 * 2000 / 8 / stages
    assert flops / 989e12 < prefill.price("h100").seconds < 10 * flops / 989e12


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
    "prompts that change": ({"token_healing": True}, "token_healing=True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_would_change_the_text_are_refused_by_name(case: str) -> None:
    model, (options, message) = model_of("Llama"), REFUSED[case]
    for name, value in options.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match=rf"model.generation_config has {message}, which fp.generate does not do"):
        fp.Generator(model, Mesh(data=1))


WITHOUT_EFFECT = {
    *("max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p"),  # arguments here
    *("early_stopping", "length_penalty", "low_memory"),  # of beams
    *("renormalize_logits", "remove_invalid_values"),  # of processors, and of scores that are not finite
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "speculation_type"),  # of an assistant, which is an argument of generate
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),  # read elsewhere
    *("compile_config", "disable_compile", "continuous_batching_config", "_from_model_config", "transformers_version"),
}


def test_every_option_of_transformers_is_known() -> None:
    options = transformers.GenerationConfig().to_dict()
    assert not set(options) - WITHOUT_EFFECT - set(_NOT_BUILT), "refuse them, or note why they change no text"


@pytest.mark.parametrize("option", ["num_beams", "logits_processor", "repetition_penalty", "do_sample", "max_length"])
def test_arguments_of_transformers_are_explained(option: str) -> None:
    model = model_of("Llama")
    wanted = {"do_sample": "give temperature=", "max_length": "give it to the call, max_new_tokens=3"}
    with pytest.raises(TypeError, match=f"Generator has no argument {option}: {wanted.get(option, 'it is not built')}"):
        fp.generate(model, dict(fp.functional(model)[1]), PROMPTS, Mesh(data=1), max_new_tokens=1, **{option: 3})


OTHER_STATES: dict[str, dict[str, Any]] = {
    "Mamba": {"hidden_size": 16, "state_size": 4},
    "Mamba2": {"hidden_size": 16, "state_size": 4, "num_heads": 4, "head_dim": 8},
    "FalconMamba": {"hidden_size": 16, "state_size": 4},
    "RecurrentGemma": {"hidden_size": 16, "num_attention_heads": 2, "lru_width": 16, "intermediate_size": 32},
    "Rwkv": {"hidden_size": 16, "attention_hidden_size": 16},
}


@pytest.mark.parametrize("family", OTHER_STATES)
def test_other_states_than_keys_and_values_are_refused_by_name(family: str) -> None:
    layers = 3 if family == "RecurrentGemma" else 2
    config = getattr(transformers, f"{family}Config")(vocab_size=32, num_hidden_layers=layers, **OTHER_STATES[family])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(
        ValueError, match=rf"{family}ForCausalLM keeps another state than keys and values \(.*\), which"
    ):
        fp.Generator(model, Mesh(data=1))


def test_models_that_do_not_generate_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear is not a model of transformers that generates"):
        fp.Generator(torch.nn.Linear(2, 2), Mesh(data=1))
    encoder = transformers.BertModel(transformers.BertConfig(vocab_size=32, hidden_size=24, num_hidden_layers=1))
    with pytest.raises(ValueError, match="BertModel is not a model of transformers that generates"):
        fp.Generator(encoder, Mesh(data=1))


@pytest.mark.parametrize("kind", ["StaticCache", "DynamicCache"])
def test_caches_of_transformers_are_refused_by_name(kind: str) -> None:
    model = model_of("Mistral")
    fn, params = fp.functional(model)

    def cache(params: Any, rows: int, length: int) -> Any:
        named = {"max_cache_len": length} if kind == "StaticCache" else {}
        return getattr(transformers, kind)(config=model.config, **named)

    def f(params: Any, cache: Any, tokens: Tensor, positions: Tensor) -> Any:
        return fn(params, input_ids=tokens, position_ids=positions, past_key_values=cache).logits, cache

    generator = fp.Generator(f, Mesh(data=1), cache=cache)
    with pytest.raises(ValueError, match=rf"cache\(params, 1, 32\) has a {kind}: a cache is a tree of tensors"):
        generator(params, [[3, 4]], max_new_tokens=3)


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
    masked: list[tuple[Any, str]] = [
        ([[1, 0, 1]], "prompt 0: the attention mask leaves out tokens between others"),
        ([[1, 1]], r"prompt 0: the attention mask, \(2,\) int64, is not a 0 or 1 for each of \(3,\) int64"),
        ([[1, 1, 1, 1]], r"prompt 0: the attention mask, \(4,\) int64"),
        (torch.ones(1, 1, 3), r"prompt 0: the attention mask, \(1, 3\) float32"),
        ([[-1e9, 0.0, 0.0]], r"prompt 0: the attention mask, \(3,\) float32, is not a 0 or 1"),
        ([[1, 1, 1]] * 2, "1 prompts and an attention mask of 2 rows: give it a row per prompt"),
        ([[0, 0, 0]], r"prompt 0: \(0,\) int64; a prompt is a list of one or more token numbers"),
    ]
    for mask, message in masked:
        with pytest.raises(ValueError, match=message):
            generator(params, {"input_ids": [[5, 6, 7]], "attention_mask": mask}, max_new_tokens=1)
    for others in ({"pixel_values": torch.ones(1)}, {"token_type_ids": [[0, 0, 1]]}, {"inputs_embeds": [[[0.0]]]}):
        with pytest.raises(ValueError, match=rf"prompts with 'input_ids', '{next(iter(others))}': generation reads"):
            generator(params, {"input_ids": [[5, 6, 7]], **others}, max_new_tokens=1)
    with pytest.raises(ValueError, match="prompts with 'tokens': generation reads 'input_ids' and 'attention_mask'"):
        generator(params, {"tokens": [[5, 6, 7]]}, max_new_tokens=1)
    side = torch.tensor([[5, 6], [0, 7]])
    with pytest.raises(ValueError, match=r"prompt 1 is padded on the left with token 0.*attention_mask"):
        generator(params, side, max_new_tokens=1)
    padded = {
        "token_type_ids": torch.zeros(2, 2),
        "input_ids": torch.tensor([[5, 6], [7, 0]]),
        "attention_mask": torch.tensor([[1, 1], [1, 0]]),
    }
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
