"""The names of transformers that folders are read and written by, which are not public, do what is relied on."""

from __future__ import annotations

import inspect

import pytest

from .bags import model_of

transformers = pytest.importorskip("transformers")
mapping = pytest.importorskip("transformers.conversion_mapping")
loading = pytest.importorskip("transformers.core_model_loading")


def test_the_mapping_of_a_model_has_renames_and_conversions() -> None:
    found = mapping.get_model_conversion_mapping(model_of("Mixtral")[0])
    converters = [each for each in found if isinstance(each, loading.WeightConverter)]
    assert any(isinstance(each, loading.WeightRenaming) for each in found) and converters
    assert all(each.source_patterns and each.operations and not each.was_used() for each in converters)
    name, pattern = loading.rename_source_key(
        "model.layers.0.block_sparse_moe.experts.1.w2.weight",
        [each for each in found if isinstance(each, loading.WeightRenaming)],
        converters,
        "model",
        {},
    )
    assert name == "model.layers.0.mlp.experts.down_proj" and pattern in {
        p for c in converters for p in c.source_patterns
    }


def test_keys_are_in_the_order_of_their_numbers() -> None:
    assert sorted(["a.10.b", "a.9.b"], key=loading.dot_natural_key) == ["a.9.b", "a.10.b"]


def test_what_functions_and_methods_take() -> None:
    assert [*inspect.signature(loading.revert_weight_conversion).parameters] == ["model", "state_dict"]
    takes = [*inspect.signature(loading.WeightConverter.add_tensor).parameters]
    assert takes == ["self", "target_key", "source_key", "source_pattern", "future"]
    kind = transformers.PreTrainedModel
    for name in ("_from_config", "_get_dtype_plan", "initialize_weights", "_adjust_missing_and_unexpected_keys"):
        assert callable(getattr(kind, name)), name
    assert kind._keys_to_ignore_on_save is None and isinstance(kind.base_model_prefix, str)
