"""Small models of the families of transformers, unmodified, each with a batch and its own loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

import functional_parallel as fp

__all__ = ["FAMILIES", "Batch", "Family", "KeepDouble", "Loss", "labels", "loss_of", "made", "tokens"]

Batch = dict[str, torch.Tensor]
Loss = Callable[..., torch.Tensor]

LLAMA = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**LLAMA, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
PLAIN = {**LLAMA, "intermediate_size": 48, "max_position_embeddings": 32}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
NO_DROPOUTS = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
TWO_SIDES: dict[str, Any] = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0},
    **{"attention_dropout": 0.0, "activation_dropout": 0.0, "vocab_size": 64, "decoder_start_token_id": 1, **TOKENS},
}


def tokens(length: int = 8) -> torch.Tensor:
    return torch.randint(3, 64, (4, length), generator=torch.Generator().manual_seed(0))


def labels() -> torch.Tensor:
    """Tokens of which some do not count, more on one data rank than on the other."""
    found = tokens().clone()
    found[0, 2:7] = -100
    return found


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def text() -> Batch:
    return {"input_ids": tokens(), "labels": labels()}


def images() -> Batch:
    return {"pixel_values": normal(4, 3, 16, 16), "labels": torch.arange(4)}


def sounds() -> Batch:
    return {"input_features": normal(4, 8, 32), "labels": labels()}


def captions() -> Batch:
    ends = tokens()
    ends[:, -1] = 2
    return {"input_ids": ends, "pixel_values": normal(4, 3, 16, 16)}


class Family(NamedTuple):
    """A model class, the options of its configuration, and the batch. A mixture of experts runs in float32."""

    model: str
    options: dict[str, Any]
    batch: Callable[[], Batch] = text
    config: str = ""
    experts: bool = False


def _clip() -> dict[str, Any]:
    side = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {**side, "vocab_size": 64, "max_position_embeddings": 32, "projection_dim": 16, **TOKENS}
    sight = {**side, "image_size": 16, "patch_size": 4, "projection_dim": 16}
    return {"text_config": words, "vision_config": sight, "projection_dim": 16}


CAUSAL = (  # models of the table that write text
    *("Llama", "Qwen3", "Mistral", "Gemma3", "Phi3", "OLMo2"),
    *("GPT-NeoX", "Falcon", "OPT", "GPT-2", "GPT-Neo", "Mixtral"),
)
FAMILIES: dict[str, Family] = {
    "Llama": Family("LlamaForCausalLM", GROUPED),
    "Qwen2": Family("Qwen2ForCausalLM", GROUPED),
    "Qwen3": Family("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
    "Mistral": Family("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "Gemma": Family("GemmaForCausalLM", {**GROUPED, "head_dim": 8}),
    "Gemma2": Family("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "Gemma3": Family("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}, config="Gemma3TextConfig"),
    "GPT-NeoX": Family("GPTNeoXForCausalLM", PLAIN),
    "Phi": Family("PhiForCausalLM", {**GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Granite": Family("GraniteForCausalLM", GROUPED),
    "Starcoder2": Family("Starcoder2ForCausalLM", {**GROUPED, "sliding_window": None}),
    "Cohere": Family("CohereForCausalLM", {**GROUPED, **TOKENS}),
    "SmolLM3": Family("SmolLM3ForCausalLM", {**GROUPED, **TOKENS}),
    "OLMo2": Family("Olmo2ForCausalLM", {**GROUPED, **TOKENS}),
    "GLM4": Family("Glm4ForCausalLM", {**GROUPED, **TOKENS, "head_dim": 8}),
    "Phi3": Family("Phi3ForCausalLM", {**GROUPED, **TOKENS, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "Mixtral": Family("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 4}, experts=True),
    "Qwen3-MoE": Family(
        "Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}, experts=True
    ),
    "GPT-2": Family("GPT2LMHeadModel", {**GPT, **NO_DROPOUT}),
    "GPT-Neo": Family(
        "GPTNeoForCausalLM",
        {
            **{"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 4},
            **dict.fromkeys(("resid_dropout", "embed_dropout", "attention_dropout"), 0.0),
        },
    ),
    "OPT": Family(
        "OPTForCausalLM",
        {**LLAMA, **TOKENS, "ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0},
    ),
    "Falcon": Family("FalconForCausalLM", {**LLAMA, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "BLOOM": Family("BloomForCausalLM", {**LLAMA, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0}),
    "T5": Family(
        "T5ForConditionalGeneration",
        {
            **{"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
            **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
        },
    ),
    "BART": Family("BartForConditionalGeneration", {**TWO_SIDES, "max_position_embeddings": 32}),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        {**TWO_SIDES, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
        sounds,
    ),
    "BERT": Family("BertForMaskedLM", {**PLAIN, **NO_DROPOUTS}),
    "RoBERTa": Family("RobertaForMaskedLM", {**PLAIN, **NO_DROPOUTS, **TOKENS}),
    "ViT": Family(
        "ViTForImageClassification",
        {**PLAIN, **NO_DROPOUTS, "image_size": 16, "patch_size": 4, "num_labels": 8},
        images,
    ),
    "CLIP": Family("CLIPModel", _clip(), captions),
}


def made(name: str, experts: str = "grouped_mm", **options: Any) -> tuple[torch.nn.Module, Batch]:
    """Return the model of a family in training mode, with its batch, in float64 or float32.

    A pipeline cannot stream experts in the implementation "grouped_mm", which sorts the tokens of all microbatches.
    """
    import transformers

    family = FAMILIES[name]
    config = (
        family.config or f"{family.model.partition('For')[0].removesuffix('LMHeadModel').removesuffix('Model')}Config"
    )
    torch.manual_seed(0)
    dtype = torch.float32 if family.experts else torch.float64
    model: Any = getattr(transformers, family.model)(getattr(transformers, config)(**{**family.options, **options}))
    model.to(dtype).train()
    if name == "BLOOM":  # its own autograd.Function of this value has no transform
        for block in model.transformer.h:
            block.mlp.gelu_impl = torch.nn.GELU("tanh")
    if family.experts:
        model.set_experts_implementation(experts)
    batch = {key: x.to(dtype) if x.is_floating_point() else x for key, x in family.batch().items()}
    return model, batch


class KeepDouble(TorchFunctionMode):
    """Turns casts to float32 inside a model's own code into nothing, so that float64 stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(args[0] if args else None, torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return func(*args, **kwargs)


def loss_of(model: torch.nn.Module, double: bool) -> tuple[Loss, dict[str, torch.Tensor]]:
    fn, params = fp.functional(model)
    options = {"return_loss": True} if type(model).__name__ == "CLIPModel" else {}

    def loss(params: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        with KeepDouble() if double else nullcontext():
            return fn(params, **batch, **options).loss

    return loss, params
