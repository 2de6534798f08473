"""Tensors of a model by its own names, from the tensors of a folder, and back: transformers' renames and conversions."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from ...errors import CheckpointError
from ...ir import current_source, warn_at
from ...stateful import listed
from .assembled import Assembled

_LOADING, _MAPPING = "transformers.core_model_loading", "transformers.conversion_mapping"


def first_names(model: Any) -> dict[str, str]:
    """Return the first name of each tensor in the state of a model, by all of its names."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    names = [*dict(model.named_parameters()), *state]
    held = {**dict(model.named_parameters()), **state}
    return {name: first.setdefault(id(held[name]), name) for name in dict.fromkeys(names)}


def read_names(model: Any, found: Mapping[str, Assembled], where: str) -> dict[str, list[Assembled]]:
    """Return the tensors of a model's state by their first names, from those of a folder by key.

    A tied weight has several if the folder has it by several names.
    """
    loading, state, first = import_module(_LOADING), model.state_dict(), first_names(model)
    conversions = import_module(_MAPPING).get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, work, unexpected = model.base_model_prefix, dict[str, Any](), set[str]()
    for key in sorted(found, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if name not in state:
            unexpected.add(key)
            continue
        made = deepcopy(of_pattern[pattern]) if pattern is not None else loading.WeightRenaming(key, name)
        work.setdefault(name, made).add_tensor(name, key, key if pattern is None else pattern, found[key])
    values: dict[str, list[Assembled]] = {}
    for name, conversion in work.items():
        for each, value in conversion.convert(name, model=model, config=model.config).items():
            value = value[0] if isinstance(value, list) else value
            values.setdefault(first.get(each, each), []).append(value)
            _warn_of_full_reads(each, value, conversion)
    model._weight_conversions = [each for each in conversions if each.was_used()]  # transformers saves by them
    _require_names(model, first, values, unexpected, where)
    return values


def written_names(model: Any, values: Mapping[str, Assembled]) -> dict[str, Assembled]:
    """Return the tensors of a folder by key, from those of a model by name."""
    ignored = model._keys_to_ignore_on_save or ()
    made: dict[str, Assembled] = import_module(_LOADING).revert_weight_conversion(
        model, {name: value for name, value in values.items() if name not in ignored}
    )
    return made


def _warn_of_full_reads(name: str, value: Assembled, conversion: Any) -> None:
    if value.is_cut_late():
        ops = ", ".join(type(each).__name__ for each in conversion.operations)
        warn_at(
            current_source(),
            f"load_pretrained: {name}: each rank reads {len(value.keys())} tensors in full, because a slice is not "
            f"known through all of {ops}",
            RuntimeWarning,
        )


def _require_names(
    model: Any, first: Mapping[str, str], values: Mapping[str, list[Assembled]], unexpected: set[str], where: str
) -> None:
    known = set(first.values())
    told = SimpleNamespace(missing_keys=known - values.keys(), unexpected_keys=unexpected | values.keys() - known)
    model._adjust_missing_and_unexpected_keys(told)  # without what the model computes, or does not need
    missing = told.missing_keys | (dict(model.named_parameters()).keys() - values.keys())
    state, rows = model.state_dict(), list[str]()
    for name, value in ((name, value) for name, found in values.items() if name in state for value in found):
        if value.shape != state[name].shape:
            rows.append(f"{name}: {tuple(value.shape)} in the files, {tuple(state[name].shape)} in the model")
    rows += [f"{name}: missing in the files" for name in sorted(missing)]
    rows += [f"{name}: unexpected, the model has no such tensor" for name in sorted(told.unexpected_keys)]
    if rows:
        raise CheckpointError(
            f"{where} does not have the weights of {type(model).__name__}:\n  "
            + "\n  ".join(listed(rows))
            + "\nGive model_class=… the class whose weights these are, or correct config.json"
        )
