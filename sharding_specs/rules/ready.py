"""Ready rules of well-known models: Megatron's column and row splits for the parameter names of transformers.

All of them are optional. The names that peft gives to the same parameters match too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..spec import P
from .matching import optional

_WRAPPERS = ("base_layer", "original_module", "modules_to_save/*")  # of peft, around a layer
_TABLES = ("wte", "embed_tokens", "word_embeddings")


def with_peft_names(rules: Mapping[str, P], *, transposed: bool = False) -> dict[str, P]:
    """Return the rules, and rules for the names that peft gives to the same parameters and to LoRA's matrices.

    The product of LoRA's matrices, `B @ A`, has the shape of a linear weight. B has the weight's split of output dims,
    and A has its split of input dims, so neither is gathered. Weights are `transposed` if dim 0 is the input (GPT-2).
    """
    found = dict[str, P]()
    for pattern, spec in rules.items():
        layer, _, kind = pattern.rpartition("/")
        found[pattern] = spec
        if kind in ("weight", "bias") and layer:
            found |= {f"{layer}/{wrapper}/{kind}": spec for wrapper in _WRAPPERS}
        first, second = (*spec.dims, None, None)[:2]
        if kind == "weight" and layer.endswith(_TABLES):
            found |= {f"{layer}/lora_embedding_A/*": P(None, first), f"{layer}/lora_embedding_B/*": P(second)}
        elif kind == "weight" and layer:
            out, taken = (second, first) if transposed and layer != "*/lm_head" else (first, second)
            found |= {f"{layer}/lora_A/*/weight": P(None, taken), f"{layer}/lora_B/*/weight": P(out)}
    return {optional(pattern): spec for pattern, spec in {**found, "*": P()}.items()}


def columns_and_rows(columns: Iterable[str], rows: Iterable[str], axis: str) -> dict[str, P]:
    found = {f"*/{name}/{kind}": P(axis) for name in columns for kind in ("weight", "bias")}
    return found | {f"*/{name}/weight": P(None, axis) for name in rows}


def gpt2(axis: str = "tensor") -> dict[str, P]:
    """Rules of GPT-2: fused query-key-value split by heads, MLP by columns then rows, vocabulary split.

    >>> gpt2()["*/c_attn/weight"]
    P(None, (3, 'tensor'))
    """
    rules = {
        "*/wte/weight": P(axis),
        "*/lm_head/weight": P(axis),
        "*/c_attn/weight": P.parse(f"embed (3 heads/{axis} dim)"),
        "*/c_attn/bias": P.parse(f"(3 heads/{axis} dim)"),
        "*/attn/c_proj/weight": P(axis),
        "*/c_fc/weight": P(None, axis),
        "*/c_fc/bias": P(axis),
        "*/mlp/c_proj/weight": P(axis),
    }
    return with_peft_names(rules, transposed=True)


def llama(axis: str = "tensor") -> dict[str, P]:
    """Rules of Llama: query, key, value, gate and up by columns, output and down by rows, vocabulary split."""
    columns = [f"{name}_proj" for name in ("q", "k", "v", "gate", "up")]
    rules = columns_and_rows(columns, ("o_proj", "down_proj"), axis)
    return with_peft_names({**rules, "*/embed_tokens/weight": P(axis), "*/lm_head/weight": P(axis)})


def bert(axis: str = "tensor") -> dict[str, P]:
    """Rules of BERT: query, key, value and intermediate by columns, outputs by rows, vocabulary split."""
    rules = {f"*/self/{name}/{kind}": P(axis) for name in ("query", "key", "value") for kind in ("weight", "bias")}
    rules |= {f"*/intermediate/dense/{kind}": P(axis) for kind in ("weight", "bias")}
    rules |= {"*/attention/output/dense/weight": P(None, axis), "*/output/dense/weight": P(None, axis)}
    rules |= {"*/word_embeddings/weight": P(axis), "*/decoder/weight": P(axis), "*/predictions/*bias": P(axis)}
    return with_peft_names({"*/transform/*": P(), **rules})


def vit(axis: str = "tensor") -> dict[str, P]:
    """Rules of ViT: query, key, value and the MLP's first layer by columns, outputs and its second layer by rows."""
    columns = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "fc1", "intermediate/dense")
    return with_peft_names(columns_and_rows(columns, ("o_proj", "fc2", "attention/output/dense", "output/dense"), axis))


_QKV = ("q_proj", "k_proj", "v_proj")
_FUSED = (("query_key_value", "dense_h_to_4h"), ("self_attention/dense", "dense_4h_to_h"))
_ENCODERS = ((*_QKV, "fc1"), ("self_attn/out_proj", "encoder_attn/out_proj", "fc2"))
_LAYERS = {  # by the model type of a configuration: layers by columns, and by rows
    **dict.fromkeys(("bloom", "falcon"), _FUSED),
    **dict.fromkeys(("bart", "clip", "clip_text_model", "clip_vision_model", "opt", "whisper"), _ENCODERS),
    "gpt_neo": ((*_QKV, "c_fc"), ("attention/out_proj", "c_proj")),
    "t5": (("q", "k", "v", "wi", "wi_0", "wi_1"), ("o", "wo", "relative_attention_bias")),
}
_READY = {"bert": bert, "gpt2": gpt2, "llama": llama, "roberta": bert, "vit": vit}
FAMILIES = sorted([*_LAYERS, *_READY])


def of_family(model_type: str, axis: str) -> dict[str, P]:
    """Return the rules of one of `FAMILIES`."""
    if model_type in _READY:
        return _READY[model_type](axis)
    return with_peft_names(columns_and_rows(*_LAYERS[model_type], axis))
