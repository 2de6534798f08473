"""Rules of a model of transformers, read from the model: its own plan of tensor parallelism, or a table of families.

Nothing here imports transformers. A model is a module with `config` and, for most causal models, `_tp_plan`: patterns
of module names → styles of tensor parallelism. A style becomes specs of the parameters alone, because the collectives
of activations follow from them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import SpecError, SpecWarning
from ..mesh import Mesh
from ..spec import P
from .matching import apply_rules, match_rules, optional
from .ready import FAMILIES, of_family, with_peft_names

_REPLICATED = {  # styles of activations, and of gradients that the types of values decide here
    *("replicate", "replicated_with_grad_allreduce", "all_reduce", "sequence_parallel", "local_params"),
    *("moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj"),
}
_HEADS_OF = {  # by the name of a layer of an attention
    **dict.fromkeys(("q_proj", "q_norm", "query", "q"), "queries"),
    **dict.fromkeys(("k_proj", "k_norm", "v_proj", "key", "value", "k", "v"), "keys"),
    **dict.fromkeys(("qkv_proj", "query_key_value", "c_attn"), "all"),
}
_QUERY_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_OWN_RULES = (
    "write rules, path patterns → specs: {'*/up/weight': P('tensor'), '*/down/weight': P(None, 'tensor'), '*': P()}"
)


def for_model(model: torch.nn.Module, axis: str = "tensor", *, mesh: Mesh | None = None) -> dict[str, P]:
    """Return the rules of a model of transformers for tensor parallelism.

    They are read from the model's own plan (`model._tp_plan`). Families without one have a table: BART, BERT, BLOOM,
    CLIP, Falcon, GPT-2, GPT-Neo, OPT, RoBERTa, T5, ViT and Whisper. The input and output embeddings are split by
    vocabulary. A model on the meta device and a model of peft have the same rules.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4)
    >>> with torch.device("meta"):
    ...     rules = for_model(LlamaForCausalLM(config), "tensor", mesh=Mesh(tensor=2))
    >>> rules["model/layers/*/self_attn/o_proj/weight"], rules["lm_head/weight"]
    (P(None, 'tensor'), P('tensor'))

    Args:
        model: the model, or a module of one, as it is given to `fp.functional`.
        axis: the mesh axis of the rules.
        mesh: the mesh. With it, a weight that the axis does not divide is replicated, with a warning: a vocabulary, or
            an attention whose heads the axis does not divide. Without it, uneven weights are errors of the transform,
            and activations of uneven heads are gathered.

    Returns:
        Rules: patterns of the parameters → specs, the last one `"*": P()`.

    Raises:
        TypeError: if the model is not a module.
        SpecError: if the model has no plan and its family is not in the table, or if the rules match no layer.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"for_model({model!r}): the model is an nn.Module, with or without values")
    params, kind = dict(model.named_parameters()), getattr(getattr(model, "config", None), "model_type", "unknown")
    specs: dict[str, P] = match_rules(_given(model, kind, axis), params).specs
    tables = _tables(model, params)
    if not any(spec.axes for name, spec in specs.items() if name not in tables):
        raise SpecError(
            f"for_model: the rules of {kind!r} match no layer of {type(model).__name__}, whose "
            f"{len(params)} parameters have names like {next(reversed(params), '')!r}; {_OWN_RULES}"
        )
    specs |= dict.fromkeys(tables, P(axis))
    for name in specs:  # a norm over all heads is split like its queries or keys
        projection = re.sub(r"\b([qk])_norm\b", r"\1_proj", name)
        split = projection != name and projection in specs and specs[projection].axes
        if split and params[name].shape == params[projection].shape[:1]:
            specs[name] = P(axis)
    uneven = {} if mesh is None else _uneven(model, params, specs, mesh.axis_size(axis))
    if uneven:
        listed = {_starred(name): f"{_starred(name)} ({reason})" for name, reason in uneven.items()}
        ranks = f"{axis!r} of {mesh.axis_size(axis) if mesh else 1} ranks"
        _warn(f"{ranks} does not divide these parameters, so they are replicated: {', '.join(listed.values())}")
    return _as_patterns(params, {**specs, **dict.fromkeys(uneven, P())})


def _warn(text: str, stacklevel: int = 3) -> None:
    warnings.warn(f"for_model: {text}", SpecWarning, stacklevel)


def _given(model: torch.nn.Module, kind: str, axis: str) -> dict[str, P]:
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not plan and kind not in FAMILIES:
        raise SpecError(
            f"for_model: {type(model).__name__} of model type {kind!r} has no `_tp_plan`, and is not in the "
            f"table of families ({', '.join(FAMILIES)}); {_OWN_RULES}"
        )
    if not plan:
        return of_family(kind, axis)
    found = {name: _places(name.rpartition(".")[2], style, model, axis) for name, style in plan.items()}
    if unknown := [f"{name}: {plan[name]!r}" for name, places in found.items() if places is None]:
        _warn(
            f"the plan of {kind!r} has styles that are not known, so these modules are replicated: "
            f"{', '.join(unknown)}; give rules for them before the others: {{'*/name/weight': P({axis!r}), **rules}}",
            stacklevel=4,
        )
    rules = ((f"*/{name.replace('.', '/')}", places or {}) for name, places in found.items())
    return with_peft_names({f"{path}{end}": spec for path, places in rules for end, spec in places.items()})


def _places(layer: str, style: str, model: torch.nn.Module, axis: str) -> dict[str, P] | None:
    """Return the specs of a layer's weight and bias, and of a parameter with a dim of experts, by the end of its path.

    Dim -2 of a weight is its output, dim -1 its input.
    """
    split: Any = (2, axis) if style.startswith("packed") else axis
    if style.startswith("colwise") and layer in ("gate_up_proj", "qkv_proj"):
        queries, keys = (_heads(model, "", kind) or 1 for kind in ("queries", "keys"))
        split = (2, axis) if layer == "gate_up_proj" else ((queries, keys, keys), axis)
    if style in ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"):
        return {"/weight": P(split), "/bias": P(split), "": P(None, split)}
    if style in ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"):
        return {"/weight": P(None, split), "": P(None, None, split)}
    if style in ("embedding_rowwise", "embedding_colwise"):
        return {"/weight": P(axis) if style == "embedding_rowwise" else P(None, axis)}
    return {} if style in _REPLICATED else None


# --- Weights that the axis does not divide ---


def _uneven(
    model: torch.nn.Module, params: Mapping[str, torch.Tensor], specs: Mapping[str, P], ranks: int
) -> dict[str, str]:
    """Return what the ranks do not divide, with the reasons. An attention is split by heads, or not at all."""
    found, whole = dict[str, str](), set[str]()
    split = {name: _attention(name) for name, spec in specs.items() if spec.axes}
    for name, attention in split.items():
        for dim, (size, axes) in enumerate(zip(params[name].shape, specs[name].dim_axes(), strict=False)):
            if axes and size % ranks:
                found[name] = f"dim {dim} of size {size}"
        kind = next((_HEADS_OF[part] for part in name.split(".") if attention and part in _HEADS_OF), "")
        heads = _heads(model, name, kind) if kind else None
        if heads is not None and heads % ranks:
            found[name] = f"{heads} heads"
            whole |= set() if kind == "keys" else {attention}
    inside = {name: "its attention is replicated" for name, attention in split.items() if attention in whole}
    return inside | found


def _attention(name: str) -> str:
    """Return the path of the attention that a parameter belongs to, "" if it belongs to none."""
    found = re.match(r"(.*?\.)??[^.]*(attn|attention)[^.]*(?=\.)", name, re.IGNORECASE)
    return found.group() if found else ""


def _heads(model: torch.nn.Module, name: str, kind: str) -> int | None:
    """Return the number of heads that the innermost module around a parameter, or its configuration, has."""
    names = _QUERY_HEADS if kind == "queries" else ("num_key_value_heads", "num_kv_heads", *_QUERY_HEADS)
    parts = name.split(".")[:-1]
    for count in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:count]))
        held = (getattr(holder, each, None) for holder in (module, getattr(module, "config", None)) for each in names)
        if number := next((each for each in held if isinstance(each, int)), None):
            return number
    return None


# --- Names ---


def _tables(model: torch.nn.Module, params: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of the parameters of token embeddings and output embeddings, also of tied ones."""
    held = list[Any]()
    for module in model.modules():
        for name in ("get_input_embeddings", "get_output_embeddings"):
            try:
                found = getattr(module, name)()
            except (AttributeError, NotImplementedError):  # a module that is no model, or has no tokens
                continue
            if getattr(getattr(found, "weight", None), "ndim", 0) == 2:  # else a layer of images
                held += [found.weight, getattr(found, "bias", None)]
    return [name for name, each in params.items() if any(each is one for one in held)]


def _starred(name: str) -> str:
    return "/".join("*" if part.isdigit() else part for part in name.split("."))


def _as_patterns(params: Mapping[str, torch.nn.Parameter], specs: Mapping[str, P]) -> dict[str, P]:
    """Return the specs with one pattern for all layers, or by full paths if a pattern would match other parameters."""
    rules = {**{_starred(name): spec for name, spec in specs.items() if spec.axes}, "*": P()}
    if apply_rules(rules, specs) != specs:
        rules = {**{name.replace(".", "/"): spec for name, spec in specs.items() if spec.axes}, "*": P()}
    trained = {_starred(name) for name, each in params.items() if each.requires_grad}
    return {name if _starred(name) in trained else optional(name): spec for name, spec in rules.items()}
