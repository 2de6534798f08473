"""Trees of specs: prefixes, path rules, specs written at creation, and bytes per rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from functional_parallel.testing.strategies import cases
from sharding_specs import (
    Mesh,
    P,
    SpecError,
    annotate,
    apply_rules,
    broadcast_specs,
    bytes_per_rank,
    match_rules,
    memory_table,
    optional,
    rules,
    shard,
    split,
    tree_paths,
    validate,
)


def test_a_prefix_of_specs_covers_subtrees() -> None:
    tree = {"a": [1, (2, 3)], "b": {"c": 4}, "none": None}
    assert broadcast_specs(P("data"), tree)["a"][1] == (P("data"), P("data"))
    full = broadcast_specs({"a": "x/data", "b": None, "none": None}, tree)
    assert full == {"a": [P("data"), (P("data"), P("data"))], "b": {"c": P()}, "none": None}


@pytest.mark.parametrize(
    ("specs", "tree", "message"),
    [
        ({"a": P(), "b": P()}, {"a": 1, "c": 2}, "  c: there is no spec for it\n  b: the tree has no such node\n"),
        ({"x": {"a": P()}}, {"x": 3}, "  x: 3, but the specs have a dict of 1\n"),
        ({"x": [P()]}, {"x": [1, 2]}, "  x: a list of 2, but the specs have a list of 1\n"),
        ([P(), (P(), P())], [1, [2, 3]], "  1: a list of 2, but the specs have a tuple of 2\n"),
        (
            (P(), P()),
            torch.ones(2, 3),
            r"  the entire tree: a tensor of shape \(2, 3\), but the specs have a tuple of 2\n",
        ),
        ({"x": [P()]}, {"x": None}, "  x: None, but the specs have a list of 1\n"),
        ((P(), {"k": P(), "l": P()}), (1, {"k": 2}), "  1/l: the tree has no such node\n"),
        ([P()] * 2, [1, 2, 3], r"entire tree, \[P\(…\), P\(…\), P\(…\)\] has one per child$"),
        ({str(i): P() for i in range(20)}, {}, "  15: the tree has no such node\n  and 12 more\n"),
    ],
)
def test_a_mismatch_of_trees_names_the_path(specs: object, tree: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        broadcast_specs(specs, tree)


def test_paths_read_alike_in_nested_and_dotted_trees() -> None:
    assert tree_paths({"layers": [{"w": 0}, {"w": 0}], "head": 0}) == ["head", "layers/0/w", "layers/1/w"]
    nested, dotted = {"layers": [{"w1": 0}], "w1": 0}, {"layers.0.w1": 0, "w1": 0}
    for pattern in ("*/w1", "*.w1"):
        assert match_rules({pattern: P("data")}, nested).unmatched == []
        assert match_rules({pattern: P("data")}, dotted).unmatched == []
    assert match_rules({"layers/[0-9]/w1": P()}, nested).unmatched == ["w1"]
    assert match_rules({"*/1": P()}, {"layers": [0], "x1": 0}).unmatched == ["layers/0", "x1"]


def test_the_first_match_wins() -> None:
    pairs = [("layers/0/*", P("data")), ("*/w", "embed heads/tensor"), ("*", None)]
    found = apply_rules(pairs, {"layers": [{"w": 0}, {"w": 0}], "b": 0})
    assert found == {"layers": [{"w": P("data")}, {"w": P(None, "tensor")}], "b": P()}


def test_strict_rules_list_all_that_fits_nothing() -> None:
    with pytest.raises(SpecError) as caught:
        apply_rules({"*/w": P("data"), "*/gone": P(), "*/lost": P()}, {"a": {"w": 0, "b": 0}, "c": 0}, strict=True)
    text = str(caught.value)
    for part in ("no pattern matches a/b", "no pattern matches c", "'*/gone' finds no leaf", "'*/lost' finds no leaf"):
        assert part in text
    assert apply_rules({"*/w": P("data")}, {"w": 0, "b": 0}, default=P("tensor")) == {"w": P("data"), "b": P("tensor")}


def test_an_optional_pattern_need_not_find_a_leaf() -> None:
    """Where it finds one it is a rule as any other; merged into other rules it stays optional."""
    given = {optional("*/b"): P("data"), "*/c": P("data"), **rules.gpt2()}
    found = match_rules(given, {"x": {"a": 0, "b": 0}})
    assert found.specs == {"x": {"a": P(), "b": P("data")}} and found.unused == ["*/c"] and not found.unmatched
    assert apply_rules({"*/a": P(), optional("*/c"): P()}, {"x": {"a": 0}}, strict=True) == {"x": {"a": P()}}


def test_annotations_come_off_together() -> None:
    tree = {
        "wte": annotate(torch.zeros(8, 4), "vocab/tensor embed"),
        "layers": [annotate(torch.zeros(4), P("data"))],
        "b": 1,
    }
    params, specs = split(tree)
    assert specs == {"wte": P("tensor"), "layers": [P("data")], "b": P()}
    assert params["layers"][0].shape == (4,) and type(params["wte"]) is torch.Tensor and params["b"] == 1
    with pytest.raises(SpecError, match=r"names 2 dims, the tensor has shape \(2,\)"):
        annotate(torch.zeros(2), "vocab/tensor embed")


@given(cases())
def test_bytes_per_rank_are_those_of_the_shards(case: tuple[Mesh, P, torch.Tensor]) -> None:
    mesh, spec, whole = case
    part = shard(whole, spec, mesh, 0)
    assert bytes_per_rank(whole.to("meta"), spec, mesh) == part.numel() * part.element_size()


def test_bytes_count_padding_and_dtypes() -> None:
    tree = {"w": torch.empty(5, 4, device="meta", dtype=torch.bfloat16), "b": torch.empty(3, device="meta")}
    table = {row.path: row.bytes for row in memory_table(tree, {"w": P("data"), "b": P()}, Mesh(data=4))}
    assert table == {"w": 2 * 4 * 2, "b": 3 * 4}


# -----------------------------------------------------------------------------
# Ready rules, against the models they are for
# -----------------------------------------------------------------------------

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 16, "intermediate_size": 32}
IDS = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 24}


def _model(name: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    small_gpt2 = {"n_layer": 2, "n_head": 4, "n_embd": 16, "n_positions": 8}
    with torch.device("meta"):
        if name == "gpt2":
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small_gpt2, **IDS))
        if name == "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **IDS, mlp_bias=True))
        if name == "bert":
            return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=24))
        return transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=8, patch_size=4))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_ready_rules_know_every_parameter(name: str) -> None:
    """Every matrix of a layer is split, in pairs: columns first (with their bias), then rows (their bias whole)."""
    params = dict(_model(name).named_parameters())
    match = match_rules(getattr(rules, name)("tensor"), params)
    assert match.unmatched == []
    validate(params, match.specs, Mesh(tensor=4))
    for path, spec in match.specs.items():
        if "norm" in path.lower() or ".ln_" in path or "position" in path or "wpe" in path:
            assert spec == P(), path
        elif ("layer" in path or ".h." in path) and path.endswith("weight"):
            assert spec.axes == {"tensor"}, path
            _check_bias(match.specs, path, columns_last=name == "gpt2")


def _check_bias(specs: dict[str, P], path: str, columns_last: bool) -> None:
    """A bias is split as its matrix's outputs are: the last dim of GPT-2's Conv1D, the first of a Linear."""
    bias = specs.get(path.removesuffix("weight") + "bias")
    outputs = (*specs[path].dims, (), ())[1 if columns_last else 0]
    assert bias is None or bias == P(outputs), path


def test_every_word_embedding_is_split_by_vocabulary() -> None:
    for name, path in [
        ("gpt2", "transformer.wte.weight"),
        ("llama", "lm_head.weight"),
        ("bert", "cls.predictions.bias"),
    ]:
        params = dict(_model(name).named_parameters())
        assert apply_rules(getattr(rules, name)(), params)[path] == P("tensor")
