"""Rules of a model of transformers, read from the model: its own plan of tensor parallelism, or a table of families.

Nothing here imports transformers. A model is a module with `config` and, for most causal models, `_tp_plan`: patterns
of module names → styles of tensor parallelism. A style becomes specs of the parameters alone, because the collectives
of activations follow from them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import SpecError, SpecWarning
from ..mesh import Mesh
from ..spec import P
from .matching import apply_rules, match_rules, optional
from .ready import FAMILIES, of_family, with_peft_names

_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_REPLICATED = {  # styles of activations, and of gradients that the types of values decide here
    *("replicate", "replicated_with_grad_allreduce", "all_reduce", "sequence_parallel", "local_params"),
    *("moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj"),
}
_KEYS_AND_VALUES = {"k_proj", "v_proj", "key", "value", "k", "v"}
_QUERIES = {"q_proj", "query", "q"}
_FUSED = {"qkv_proj", "query_key_value", "c_attn"}


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
        SpecError: if the model has no plan and its family is not in the table, or if the rules match no parameter.
    """
    params = dict(model.named_parameters())
    specs: dict[str, P] = match_rules(_given(model, axis), params).specs
    tables = _tables(model, params)
    if not any(spec.axes for name, spec in specs.items() if name not in tables):
        raise SpecError(
            f"for_model: the rules of {_type(model)!r} match no layer of {type(model).__name__}, whose "
            f"{len(params)} parameters have names like {next(reversed(params), '')!r}; {_OWN_RULES}"
        )
    specs |= dict.fromkeys(tables, P(axis))
    if mesh is not None:
        specs = _fitted(model, params, specs, axis, mesh)
    return _as_patterns(params, specs)


_OWN_RULES = (
    "write rules, path patterns → specs: {'*/up/weight': P('tensor'), '*/down/weight': P(None, 'tensor'), '*': P()}"
)


def _type(model: torch.nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _given(model: torch.nn.Module, axis: str) -> dict[str, P]:
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if plan:
        return with_peft_names(_translated(model, plan, axis))
    if _type(model) not in FAMILIES:
        raise SpecError(
            f"for_model: {type(model).__name__} of model type {_type(model)!r} has no `_tp_plan`, and is not in the "
            f"table of families ({', '.join(FAMILIES)}); {_OWN_RULES}"
        )
    return of_family(_type(model), axis)


# --- Plans of transformers ---


def _translated(model: torch.nn.Module, plan: Mapping[str, str], axis: str) -> dict[str, P]:
    found, unknown = dict[str, P](), dict[str, str]()
    for name, style in plan.items():
        places = _places(name.rpartition(".")[2], style, model, axis)
        if places is None:
            unknown[name] = style
        found |= {f"*/{name.replace('.', '/')}{kind}": spec for kind, spec in (places or {}).items()}
    if unknown:
        listed = ", ".join(f"{name}: {style!r}" for name, style in unknown.items())
        warnings.warn(
            f"for_model: the plan of {_type(model)!r} has styles that are not known, so these modules are replicated: "
            f"{listed}; give rules for them before the others: {{'*/name/weight': P({axis!r}), **rules}}",
            SpecWarning,
            stacklevel=4,
        )
    return found


def _places(layer: str, style: str, model: torch.nn.Module, axis: str) -> dict[str, P] | None:
    """Return the specs of a layer's weight and bias, and of a parameter with a dim of experts, by the end of its path.

    Dim -2 of a weight is its output, dim -1 its input.
    """
    out: Any = (2, axis) if style.startswith("packed") else axis
    if style in _COLUMNS and layer in ("gate_up_proj", "qkv_proj"):
        out = (2, axis) if layer == "gate_up_proj" else _blocks_of_heads(model, axis)
    if style in (*_COLUMNS, "packed_colwise"):
        return {"/weight": P(out), "/bias": P(out), "": P(None, out)}
    if style in (*_ROWS, "packed_rowwise"):
        return {"/weight": P(None, out), "": P(None, None, out)}
    if style in ("embedding_rowwise", "embedding_colwise"):
        return {"/weight": P(axis) if style == "embedding_rowwise" else P(None, axis)}
    return {} if style in _REPLICATED else None


def _blocks_of_heads(model: torch.nn.Module, axis: str) -> Any:
    queries, keys = (_heads([model], names) or 1 for names in (_QUERY_HEADS, _KEY_HEADS + _QUERY_HEADS))
    return (queries, keys, keys), axis


# --- Weights that the axis does not divide ---


def _fitted(
    model: torch.nn.Module, params: Mapping[str, torch.Tensor], specs: Mapping[str, P], axis: str, mesh: Mesh
) -> dict[str, P]:
    """Replicate what the ranks do not divide, and warn of it. An attention is split by heads, or not at all."""
    ranks, found, uneven, whole = mesh.axis_size(axis), dict(specs), dict[str, str](), set[str]()
    for name, spec in specs.items():
        if not spec.axes:
            continue
        parts, attention = set(name.split(".")), _attention(name)
        extents = {dim: params[name].shape[dim] for dim, axes in enumerate(spec.dim_axes()) if axes}
        reason = next((f"dim {dim} of size {n}" for dim, n in extents.items() if n % ranks), "")
        if attention and parts & (_KEYS_AND_VALUES | _QUERIES | _FUSED):
            names = _QUERY_HEADS if parts & _QUERIES else _KEY_HEADS + _QUERY_HEADS
            heads = _heads(_around(model, name), names) or ranks
            if heads % ranks:
                reason = f"{heads} heads"
                whole |= set() if parts & _KEYS_AND_VALUES else {attention}
        if reason:
            found[name], uneven[_starred(name)] = P(), reason
    for name in [name for name, spec in found.items() if spec.axes and _attention(name) in whole]:
        found[name], uneven[_starred(name)] = P(), "its attention is replicated"
    if uneven:
        listed = ", ".join(f"{name} ({reason})" for name, reason in uneven.items())
        text = f"for_model: {axis!r} of {ranks} ranks does not divide these parameters, so they are replicated: "
        warnings.warn(text + listed, SpecWarning, stacklevel=3)
    return found


_KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
_QUERY_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")


def _attention(name: str) -> str:
    """Return the path of the attention that a parameter belongs to, "" if it belongs to none."""
    parts = name.split(".")
    inside = next((i for i, part in enumerate(parts) if re.search("attn|attention", part.lower())), -1)
    return ".".join(parts[: inside + 1])


def _around(model: torch.nn.Module, name: str) -> list[torch.nn.Module]:
    """Return the modules around a parameter, the innermost first."""
    parts = name.split(".")[:-1]
    return [model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1)]


def _heads(modules: Iterable[torch.nn.Module], names: Iterable[str]) -> int | None:
    """Return the first number of heads that a module, or its configuration, has under one of the names."""
    for module in modules:
        for holder in (module, getattr(module, "config", None)):
            held = [getattr(holder, name, None) for name in names]
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
    patterns = {_starred(name): spec for name, spec in specs.items() if spec.axes}
    rules = {**patterns, "*": P()}
    if apply_rules(rules, specs) != specs:
        rules = {**{name.replace(".", "/"): spec for name, spec in specs.items() if spec.axes}, "*": P()}
    trained = {_starred(name) for name, each in params.items() if each.requires_grad}
    return {name if _starred(name) in trained else optional(name): spec for name, spec in rules.items()}
