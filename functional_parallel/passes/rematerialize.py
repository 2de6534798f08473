"""Rematerialisation: the backward recomputes forward values instead of saving them."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, forward_nodes, operands_of, reached, source_of
from .layer_index import LayerIndex, made_of_parameters
from .program_pass import Phase, ProgramPass
from .recompute import insert_recompute

aten = torch.ops.aten

_PRODUCTS = {aten.bmm.default, aten.mm.default, aten.baddbmm.default, aten.addmm.default}


@dataclass(frozen=True)
class Remat(ProgramPass):
    """Recompute by a policy; see `fp.remat`."""

    policy: str | Callable[[fx.Node], bool] = "layers"
    every: int = 1
    where: str = "*"
    name: ClassVar[str] = "remat"
    phase: ClassVar[Phase] = Phase.RECOMPUTE

    def run(self, traced: Traced, mesh: Mesh) -> None:
        forward = forward_nodes(traced)
        if callable(self.policy):
            dropped = {node for node in forward if not self.policy(node)}
        elif self.policy == "nothing":
            dropped = set(forward)
        elif self.policy == "attention":
            dropped = attention_cores(forward)
        else:
            dropped = self._layers(traced, forward)
        insert_recompute(traced, dropped)

    def _layers(self, traced: Traced, forward: list[fx.Node]) -> set[fx.Node]:
        layers = LayerIndex.find(traced, forward)
        segments: dict[int, Hashable] = {}
        counts: dict[str, int] = defaultdict(int)
        for index, name in enumerate(layers.names):
            if layers.is_numbered(index) and fnmatch.fnmatch(name, f"*{self.where}"):
                stem = layers.stem(index)
                segments[index] = (stem, counts[stem] // self.every)
                counts[stem] += 1
        return recomputable(forward, {node: segments.get(layer) for node, layer in layers.of.items()})


@dataclass(frozen=True)
class RecomputeMarked(ProgramPass):
    """Recompute the functions that `fp.recompute` marks in model code."""

    name: ClassVar[str] = "recompute"
    phase: ClassVar[Phase] = Phase.RECOMPUTE
    is_implied: ClassVar[bool] = True

    def run(self, traced: Traced, mesh: Mesh) -> None:
        regions = {node: source.region if (source := source_of(node)) else None for node in traced.nodes}
        if any(region is not None for region in regions.values()):
            insert_recompute(traced, recomputable(forward_nodes(traced), regions))


def recomputable(forward: Sequence[fx.Node], segments: Mapping[fx.Node, Hashable]) -> set[fx.Node]:
    """Return values of segments that no other segment of the forward reads, or that need no parameter to recompute."""
    members = set(forward)
    dropped: set[fx.Node] = set()
    weights = made_of_parameters(forward)
    for node in forward:
        segment = segments[node]
        if segment is None:
            continue
        leaves = any(user in members and segments[user] != segment for user in node.users)
        if not leaves or _follows_from_kept(node, segment, segments, dropped, weights):
            dropped.add(node)
    return dropped


def _follows_from_kept(
    node: fx.Node, segment: Hashable, segments: Mapping[fx.Node, Hashable], dropped: set[fx.Node], weights: set[fx.Node]
) -> bool:
    """Whether a value can be computed without parameters from saved values of its own segment.

    The statistics of a norm follow from the preceding result of the layer, though the weight of the norm belongs to the
    next layer.
    """
    met = reached(operands_of(node), lambda value: operands_of(value) if value in dropped else ())
    saved = (value for value in met if value not in dropped)
    return weights.isdisjoint(met) and any(segments.get(value) == segment for value in saved)


def attention_cores(forward: Collection[fx.Node]) -> set[fx.Node]:
    """Return the ops from the product of queries and keys up to the product with values (arXiv 2205.05198 §5)."""
    softmaxes = [node for node in forward if node.target is aten._softmax.default]
    before = reached(softmaxes, lambda node: () if node.target in _PRODUCTS else operands_of(node))
    inner = {node for node in forward if node.target not in _PRODUCTS}
    after = reached(softmaxes, lambda node: inner.intersection(node.users))
    return set(forward).intersection([*before, *after])
