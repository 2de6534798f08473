"""Tensors of a model by its names, from a folder's tensors, and back: transformers renames and converts them."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from sharding_specs.rules import matches, nearest

from ...errors import CheckpointError
from ...ir import current_source, warn_at
from ...stateful import listed
from .assembled import Assembled

Shape = tuple[int, ...]

_LOADING, _MAPPING = "transformers.core_model_loading", "transformers.conversion_mapping"


def first_names(model: Any) -> dict[str, str]:
    """Return the first name of each tensor in the state of a model, by all of its names."""
    first: dict[int, str] = {}
    held = {**dict(model.named_parameters()), **model.state_dict(keep_vars=True)}
    return {name: first.setdefault(id(x), name) for name, x in held.items()}


def read_names(
    model: Any, found: Mapping[str, Assembled], where: str, new: Sequence[str] = (), unused: Sequence[str] = ()
) -> dict[str, list[Assembled]]:
    """Return the tensors of a model's state by their first names, from the tensors of a folder by key.

    A tied weight has several if the folder has it by several names. Tensors that match a pattern of `new` are left out,
    and so are keys that match one of `unused` and are not of the model.
    """
    loading, state, first = import_module(_LOADING), model.state_dict(), first_names(model)
    drawn = _drawn(new, set(first.values()), type(model).__name__)
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
            unexpected |= {key} if not any(matches(each, key) for each in unused) else set()
            continue
        made = deepcopy(of_pattern[pattern]) if pattern is not None else loading.WeightRenaming(key, name)
        work.setdefault(name, made).add_tensor(name, key, key if pattern is None else pattern, found[key])
    values: dict[str, list[Assembled]] = {}
    for name, conversion in work.items():
        for each, value in conversion.convert(name, model=model, config=model.config).items():
            value = value[0] if isinstance(value, list) else value
            if first.get(each, each) in drawn:
                continue
            values.setdefault(first.get(each, each), []).append(value)
            _warn_of_full_reads(each, value, conversion)
    model._weight_conversions = [each for each in conversions if each.was_used()]  # transformers saves by them
    _require_names(model, set(first.values()) - drawn, values, unexpected, where)
    _require_kinds(state, values, where)
    return values


def written_names(model: Any, values: Mapping[str, Assembled]) -> dict[str, Assembled]:
    """Return the tensors of a folder by key, from the tensors of a model by name."""
    ignored = model._keys_to_ignore_on_save or ()
    made: dict[str, Assembled] = import_module(_LOADING).revert_weight_conversion(
        model, {name: value for name, value in values.items() if name not in ignored}
    )
    return made


def _warn_of_full_reads(name: str, value: Assembled, conversion: Any) -> None:
    if value.needs_all:
        ops = ", ".join(type(each).__name__ for each in conversion.operations)
        warn_at(
            current_source(),
            f"load_pretrained: {name}: each rank reads {len(value.keys)} tensors in full, because a slice is not "
            f"known through all of {ops}",
            RuntimeWarning,
        )


def _require_names(
    model: Any, names: Container[str], values: Mapping[str, list[Assembled]], unexpected: set[str], where: str
) -> None:
    known = {name: tuple(x.shape) for name, x in model.state_dict().items() if name in names}
    told = SimpleNamespace(missing_keys=known.keys() - values.keys(), unexpected_keys=unexpected)
    model._adjust_missing_and_unexpected_keys(told)  # without what the model computes, or does not need
    params = dict(model.named_parameters())
    wanted = {name: x for name, x in known.items() if name in values or name in params or name in told.missing_keys}
    given = {name: tuple(x.shape) for name, found in values.items() for x in reversed(found)}
    given.update(dict.fromkeys(told.unexpected_keys, ()))
    absent = [name for name, shape in wanted.items() if given.get(name) != shape]
    fixes = ["Give the class whose weights these are, or correct its config (model_class=, config=)"]
    fixes += [f"a new head is drawn if new= has patterns of its weights, such as {absent[0]!r}"] if absent else []
    if told.unexpected_keys:
        fixes.append(f"unused= has patterns of what is left out, such as {min(told.unexpected_keys)!r}")
    require_same(given, wanted, f"{where} does not have the weights of {type(model).__name__}", "; ".join(fixes))


def _require_kinds(state: Mapping[str, torch.Tensor], values: Mapping[str, list[Assembled]], where: str) -> None:
    """Check that floating-point numbers are read as such. Numbers of 8 bits have scales, which are not applied."""
    pairs = ((name, x, state[name].dtype) for name, found in values.items() for x in found)
    wrong = [
        f"{name}: {x.dtype} in the files, {dtype} in the model"
        for name, x, dtype in pairs
        if x.dtype != dtype and (_kind(x.dtype) != _kind(dtype) or x.dtype.itemsize == 1)
    ]
    if wrong:
        told = "\n  ".join(listed(wrong)).replace("torch.", "")
        raise CheckpointError(
            f"{where} has weights that are quantized, or of another kind than the model's:\n  {told}\nTake the "
            "folder of the model before quantization"
        )


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _drawn(patterns: Sequence[str], names: Collection[str], owner: str) -> set[str]:
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise CheckpointError(
                f"load_pretrained: new={pattern!r} matches no weight of {owner}: the nearest are "
                f"{', '.join(nearest(pattern, names))}"
            )
    return {name for name in names if any(matches(pattern, name) for pattern in patterns)}


def require_same(given: Mapping[str, Shape], wanted: Mapping[str, Shape], what: str, fix: str) -> None:
    """Check that tensors have the names and shapes of a model's tensors."""
    wrong = (name for name in wanted if given.get(name, wanted[name]) != wanted[name])
    rows = [f"{name}: {given[name]}, in the model {wanted[name]}" for name in wrong]
    rows += [f"{name}: missing" for name in wanted if name not in given]
    rows += [f"{name}: unexpected, the model has no such tensor" for name in given if name not in wanted]
    if rows:
        told = "\n  ".join(listed(rows))
        raise CheckpointError(f"{what}:\n  {told}\n{fix}")
