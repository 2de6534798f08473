"""Parameters and buffers of a model as a tree of blocks, by the parts of their paths, with sizes in bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import nn

from sharding_specs import tree_paths
from sharding_specs.rules import matches, nearest, prefixes

_PART = re.compile(r"[^/.]+")


@dataclass(frozen=True)
class ModelLeaf:
    """Parameter or buffer. A tied one is a single leaf with several names."""

    names: tuple[str, ...]
    bytes: int
    parameter: str | None  # the name in the tree of parameters; None for a buffer


@dataclass(frozen=True, eq=False)
class Block:
    """Part of a model: all leaves with a common prefix of their paths."""

    path: str
    leaves: tuple[ModelLeaf, ...]
    children: tuple[Block, ...]  # of a leaf, none
    is_whole: bool  # whether it must lie in one memory

    def layers(self) -> Iterator[Block]:
        """Yield the smallest blocks that may lie in different memories."""
        if self.is_whole:
            yield self
        else:
            for child in self.children:
                yield from child.layers()


def bytes_of_leaves(leaves: Iterable[ModelLeaf]) -> int:
    """Return the bytes of leaves. A tied leaf counts once."""
    return sum(leaf.bytes for leaf in set(leaves))


def blocks_of(model: Any, no_split: Collection[str] | None, dtype: torch.dtype | None) -> Block:
    """Return the tree of a module, of the parameters of `(fn, params)`, or of a pytree of parameters.

    Args:
        model: the model, on any device, meta included.
        no_split: classes of modules, or patterns of paths, of blocks that must not be split. By default the model's
            `_no_split_modules`; without them the numbered layers, up to the first number of a path.
        dtype: dtype of the floating-point leaves, if it is not their own.
    """
    if isinstance(model, tuple) and len(model) == 2 and callable(model[0]):
        model, given = getattr(model[0], "module", model[1]), dict(_leaves_of(model[1]))
    else:
        given = {}
    module = model if isinstance(model, nn.Module) else None
    pairs = sorted(_leaves_of(model), key=_in_order) if module is None else _tensors_of(module)
    tensors = {name: each for name, each in pairs if isinstance(each, torch.Tensor)}
    sizes = tensors | {name: each for name, each in given.items() if name in tensors and isinstance(each, torch.Tensor)}
    if not tensors:
        raise ValueError(f"fp.device_map: {type(model).__name__} has no parameters")
    given = given or {name: x for name, x in tensors.items() if module is None or isinstance(x, nn.Parameter)}
    names = dict[int | str, list[str]]()
    for name, tensor in tensors.items():
        names.setdefault(name if module is None else id(tensor), []).append(name)
    leaves = {name: _leaf(tied, sizes, given, dtype) for tied in names.values() for name in tied}
    return _block("", [(name, leaves[name]) for name in tensors], _wholes(module, tensors, no_split))


def _leaves_of(tree: Any) -> Iterator[tuple[str, Any]]:
    return zip(tree_paths(tree), optree.tree_leaves(tree), strict=True)


def _in_order(pair: tuple[str, Any]) -> list[tuple[bool, int, str]]:
    """Key that sorts numbers in a path as numbers: dicts are flattened in the order of texts."""
    parts = _PART.findall(pair[0])
    return [(part.isdigit(), int(part), "") if part.isdigit() else (False, 0, part) for part in parts]


def _leaf(
    tied: Sequence[str], sizes: Mapping[str, torch.Tensor], given: Mapping[str, Any], dtype: torch.dtype | None
) -> ModelLeaf:
    """Return a leaf that may have several names. A tree of parameters has one of them."""
    own = next((name for name in tied if name in given), None)
    return ModelLeaf(tuple(tied), _bytes(sizes[own or tied[0]], dtype), own)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    for path, each in module.named_modules(remove_duplicate=False):
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):
            yield f"{path}.{name}".lstrip("."), tensor


def _bytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * (dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype).itemsize


def _block(path: str, leaves: list[tuple[str, ModelLeaf]], is_named: Callable[[str], bool]) -> Block:
    grouped = dict[str, list[tuple[str, ModelLeaf]]]()
    for name, leaf in leaves:
        if part := _PART.search(name, len(path)):
            grouped.setdefault(name[: part.end()], []).append((name, leaf))
    children = tuple(_block(prefix, inner, is_named) for prefix, inner in grouped.items())
    ends = all(not child.children and not _PART.findall(child.path)[-1].isdigit() for child in children)
    return Block(path, tuple(leaf for _, leaf in leaves), children, bool(path) and (ends or is_named(path)))


def _wholes(
    module: nn.Module | None, leaves: Collection[str], no_split: Collection[str] | None
) -> Callable[[str], bool]:
    modules = {} if module is None else dict(module.named_modules(remove_duplicate=False))
    kinds = {path: type(each).__name__ for path, each in modules.items()}
    if no_split is None:
        found = {kind for each in modules.values() for kind in getattr(each, "_no_split_modules", None) or ()}
        return (lambda path: kinds.get(path) in found) if found else _is_first_number
    patterns = [no_split] if isinstance(no_split, str) else list(no_split)
    known = {*kinds.values(), *prefixes(leaves)}
    for pattern in patterns:
        if not any(pattern == each or matches(pattern, each) for each in known):
            raise ValueError(
                f"fp.device_map(no_split={pattern!r}): no module has this class, and no path matches; the nearest are "
                f"{', '.join(nearest(pattern, known))}"
            )
    return lambda path: any(kinds.get(path) == each or matches(each, path) for each in patterns)


def _is_first_number(path: str) -> bool:
    *before, last = _PART.findall(path)
    return last.isdigit() and not any(part.isdigit() for part in before)
