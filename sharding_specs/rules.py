"""Rules that assign specs by path: patterns → specs, the first match wins. Also rules for well-known models.

A pattern is a glob over a leaf's path. `/` and `.` are equivalent separators, for dotted names of modules and pytree
paths. `*` crosses separators. A leading `*/` also matches at the top level.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from fnmatch import translate
from functools import lru_cache
from typing import Any, NamedTuple

import optree

from .errors import SpecError
from .pytree import Tree
from .spec import P, as_spec
from .trees import tree_paths

Rules = Mapping[str, P | str | None] | Iterable[tuple[str, P | str | None]]


class optional(str):
    """Pattern that may match no leaf. Rules for several models contain parameters that some of them do not have.

    >>> match_rules({"*/weight": P("tensor"), optional("*/bias"): P("tensor")}, {"head": {"weight": 0}}).unused
    []
    """

    __slots__ = ()


class RuleMatch(NamedTuple):
    """Specs of all leaves, paths of leaves without a match, and patterns, not optional, without a match."""

    specs: Any
    unmatched: list[str]
    unused: list[str]


def match_rules(rules: Rules, tree: Tree, *, default: P | None = None) -> RuleMatch:
    """Find a spec for every leaf of a tree by its path.

    >>> match_rules({"*/w1": P(None, "tensor"), "head": P()}, {"layers": [{"w1": 0, "b1": 0}]})
    RuleMatch(specs={'layers': [{'w1': P(None, 'tensor'), 'b1': P()}]}, unmatched=['layers/0/b1'], unused=['head'])

    Args:
        rules: patterns → specs (or their string forms), in order. The first pattern that matches a leaf wins.
        tree: any pytree.
        default: spec of leaves without a match; replicated by default.
    """
    pairs = [(pattern, as_spec(spec)) for pattern, spec in (rules.items() if isinstance(rules, Mapping) else rules)]
    used, unmatched, specs = set(), [], []
    for path in tree_paths(tree):
        found = next(((pattern, spec) for pattern, spec in pairs if matches(pattern, path)), None)
        if found is None:
            unmatched.append(path)
            specs.append(default if default is not None else P())
        else:
            used.add(found[0])
            specs.append(found[1])
    unused = [pattern for pattern, _ in pairs if pattern not in used and not isinstance(pattern, optional)]
    return RuleMatch(optree.tree_unflatten(optree.tree_structure(tree), specs), unmatched, unused)


def apply_rules(rules: Rules, tree: Tree, *, strict: bool = False, default: P | None = None) -> Any:
    """Return only the specs of `match_rules`.

    >>> apply_rules([("*/w", "embed heads/tensor"), ("*", None)], {"a": {"w": 0, "b": 0}}, strict=True)
    {'a': {'w': P(None, 'tensor'), 'b': P()}}

    Args:
        rules, tree, default: as for `match_rules`.
        strict: raise for leaves without a match, and for patterns without a match that are not optional.

    Raises:
        SpecError: in strict mode. The message lists all of them.
    """
    match = match_rules(rules, tree, default=default)
    if strict and (match.unmatched or match.unused):
        lines = [f"  no pattern matches {path}" for path in match.unmatched]
        lines += [
            f"  pattern {pattern!r} finds no leaf (an earlier one may take its leaves)" for pattern in match.unused
        ]
        if match.unmatched:
            lines.append("end the rules with ('*', P()) to replicate the rest")
        raise SpecError("rules do not fit the tree:\n" + "\n".join(lines))
    return match.specs


@lru_cache(maxsize=4096)
def _expression(pattern: str) -> re.Pattern[str]:
    pattern = pattern.replace(".", "/")
    alternatives = [translate(pattern)]
    if pattern.startswith("*/"):
        alternatives.append(translate(pattern[2:]))
    return re.compile("|".join(alternatives))


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` matches the path of a leaf. The separators `.` and `/` are equivalent.

    >>> matches("*/bias", "layers.0.bias"), matches("*/bias", "bias"), matches("bias", "layers/0/bias")
    (True, True, False)
    """
    return _expression(pattern).match(path.replace(".", "/")) is not None


def nearest(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """Return the known paths or names that are most similar to a name or pattern, for messages.

    >>> nearest("*nrom*", ["head/w", "layers/0/norm/w", "layers/0/w1"], most=1)
    ['layers/0/norm/w']
    """
    bare = name.replace(".", "/").strip("*/")

    def likeness(path: str) -> float:
        return max(SequenceMatcher(None, bare, part).ratio() for part in (path, *path.replace(".", "/").split("/")))

    return sorted(known, key=likeness, reverse=True)[:most]


# --- Rules for models: Megatron's column and row splits for Hugging Face's parameter names, all of them optional ---

_WRAPPERS = ("base_layer", "original_module", "modules_to_save/*")  # of peft, around a layer
_TABLES = ("wte", "embed_tokens", "word_embeddings")


def _ready(rules: Mapping[str, P], *, transposed: bool = False) -> dict[str, P]:
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
    return _ready(rules, transposed=True)


def llama(axis: str = "tensor") -> dict[str, P]:
    """Rules of Llama: query, key, value, gate and up by columns, output and down by rows, vocabulary split."""
    first = ("q", "k", "v", "gate", "up")
    columns = {f"*/{name}_proj/{kind}": P(axis) for name in first for kind in ("weight", "bias")}
    rows = {f"*/{name}_proj/weight": P(None, axis) for name in ("o", "down")}
    return _ready({**columns, **rows, "*/embed_tokens/weight": P(axis), "*/lm_head/weight": P(axis)})


def bert(axis: str = "tensor") -> dict[str, P]:
    """Rules of BERT: query, key, value and intermediate by columns, outputs by rows, vocabulary split."""
    rules = {f"*/self/{name}/{kind}": P(axis) for name in ("query", "key", "value") for kind in ("weight", "bias")}
    rules |= {f"*/intermediate/dense/{kind}": P(axis) for kind in ("weight", "bias")}
    rules |= {"*/attention/output/dense/weight": P(None, axis), "*/output/dense/weight": P(None, axis)}
    rules |= {"*/word_embeddings/weight": P(axis), "*/decoder/weight": P(axis), "*/predictions/*bias": P(axis)}
    return _ready({"*/transform/*": P(), **rules})


def vit(axis: str = "tensor") -> dict[str, P]:
    """Rules of ViT: query, key, value and the MLP's first layer by columns, outputs and its second layer by rows."""
    first = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "fc1", "intermediate/dense")
    second = ("o_proj", "fc2", "attention/output/dense", "output/dense")
    rules = {f"*/{name}/{kind}": P(axis) for name in first for kind in ("weight", "bias")}
    rules |= {f"*/{name}/weight": P(None, axis) for name in second}
    return _ready(rules)
