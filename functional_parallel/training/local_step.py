"""Training step on one rank's shards: gradient, clipping, optimizer.

It converts parameters between their storage, compute and update layouts. The types of the intermediate values determine
the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import optree
import torch

from sharding_specs import P

from .. import random
from ..functions import LocalFunction, PyTree, Resolved, SpecTree, as_local_function, grad_and_value, relayout_leaf
from ..ops import NumberBeside
from ..optim import Optimizer, scheduled_rates
from ..requests import (
    StateRequest,
    Update,
    loss_arguments,
    owners_of,
    split_state,
    state_requests,
    with_leaves,
)
from .step_options import StepOptions
from .untrained import old_params, old_state, old_weights, report_untrained, untrained, without, zeros_for
from .update import (
    StepLayout,
    as_trained,
    global_norm,
    require_same_structure,
)


class Metrics(NamedTuple):
    """Results of a step, as full tensors on every rank.

    An asynchronous pipeline has no gradient norm. Its loss and aux are means over the updates of the step.

    Attributes:
        loss: the loss, without loss scale. With `fp.local_sgd` and `fp.diloco`, the mean since the last exchange; None
            in a step without an exchange.
        grad_norm: global norm of the gradients, without loss scale; None if it is not computed.
        aux: aux of the loss; None without `has_aux`.
        skipped: whether gradients overflowed, so that nothing was updated; None without a loss scale.
        loss_scale: factor of the loss in this step; None without a loss scale.
        lr: learning rate of this step; a dict by pattern for `fp.optim.by_path`. None if the optimizer has none.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    aux: PyTree = None
    skipped: torch.Tensor | None = None
    loss_scale: torch.Tensor | None = None
    lr: PyTree = None


@dataclass(frozen=True)
class LocalTrainStep:
    """Training step of a loss."""

    f: LocalFunction  # the loss
    optimizer: Optimizer
    options: StepOptions
    has_norm: bool  # whether the gradient's norm is reported
    warned: set[str] = field(default_factory=set)  # parameters and closed-over tensors of earlier warnings

    def on(self, layouts: StepLayout, state_specs: SpecTree) -> LocalFunction:
        """Return the step as a function of ((parameters, state), batch, key) to ((parameters, state), metrics)."""
        entered, inside = optree.tree_map(P.entered, state_specs), layouts.inside(state_specs)
        there = replace(layouts.entered(), update=layouts.inside(layouts.update))
        step = _StepOnShards(self, there, inside, state_requests(self.f.applied))

        def call(resolved: Resolved, held: tuple[PyTree, PyTree], batch: PyTree, key: Any) -> tuple[PyTree, SpecTree]:
            state = optree.tree_map(relayout_leaf, held[1], entered, inside)
            (params, state), metrics, specs = step(resolved.inside, held[0], state, batch, key)
            new = params, optree.tree_map(relayout_leaf, state, inside, entered)
            return (new, metrics), ((layouts.kept, state_specs), specs)

        return LocalFunction(call, self.f.applied, "train_step")


@dataclass(frozen=True)
class _StepOnShards:
    """Step on a rank's shards, with the layouts of parameters and state. Requests change it by their hooks."""

    step: LocalTrainStep
    layouts: StepLayout
    state_specs: SpecTree
    requests: tuple[StateRequest, ...]

    @property
    def passes_more(self) -> bool:
        """Whether the loss takes leaves of the state."""
        return any(each.passed for each in self.requests)

    def __call__(
        self, resolved: Resolved, params: PyTree, state: PyTree, batch: tuple[PyTree, ...], key: torch.Tensor | None
    ) -> tuple[tuple[PyTree, PyTree], Metrics, Metrics]:
        """Return new parameters and state, the metrics, and the specs of the metrics."""
        layouts, packing = self.layouts, self.layouts.packing
        before, leaves = split_state(state, self.requests)
        reduced = optree.tree_map(relayout_leaf, params, layouts.kept, layouts.compute)
        inputs = optree.tree_map(as_trained, reduced, layouts.params)
        with random.using(key) if key is not None else nullcontext():
            gradients, (value, aux, aux_specs), leaves = self._gradients(resolved, inputs, batch, leaves)
        gradients = without(gradients, layouts.frozen)
        idle = untrained(inputs, gradients)
        report_untrained(self.step.f.name, params, idle, layouts.frozen, self.step.warned)
        idle = [no_path or fixed for no_path, fixed in zip(idle, layouts.frozen, strict=True)]
        gradients = gradients if packing.groups else without(gradients, idle)
        gradients, norm, sums = self._reduced(gradients, leaves)
        packed = packing.pack(params)
        stored = optree.tree_map(relayout_leaf, packed, layouts.whole, layouts.update)
        masks = optree.tree_map(relayout_leaf, packing.masks(idle, packed), layouts.whole, layouts.update)
        more = dict[str, Any]()
        for each, held in zip(self.requests, leaves, strict=True):
            more.update(each.metrics(norm, held))
        update = self._optimized(gradients, stored, before, leaves, masks)
        update, after = self._updated(replace(update, norm=norm, sums=sums, metrics=more), leaves)
        new = packing.unpack(optree.tree_map(relayout_leaf, update.params, layouts.update, layouts.whole))
        rates = scheduled_rates(self.step.optimizer, before) if self.step.has_norm else None
        metrics = Metrics(value, norm, aux, lr=rates)._replace(**more)
        spec = P(owner=owners_of(self.step.f.applied))
        specs = optree.tree_map(lambda _: spec, metrics._replace(aux=None))._replace(aux=aux_specs)
        return (old_params(new, params, idle), with_leaves(update.state, self.requests, after)), metrics, specs

    def _gradients(
        self, resolved: Resolved, params: PyTree, batch: tuple[PyTree, ...], leaves: Sequence[PyTree]
    ) -> tuple[PyTree, tuple[torch.Tensor, PyTree, SpecTree], list[PyTree]]:
        """Return the gradients of the loss, as the requests change it; the loss, its aux and specs; what it changes."""
        f, with_aux = self.step.f, self.step.options.has_aux
        more, has_aux = loss_arguments(self.requests, leaves), with_aux or self.passes_more

        def call(resolved: Resolved, *args: PyTree) -> tuple[Any, SpecTree]:
            result, specs = f.run(resolved, *args)
            if more and not (_is_pair(result) and (not with_aux or _is_pair(result[1]))):
                what = "(value, (new buffers, aux))" if with_aux else "(value, new buffers)"
                raise ValueError(f"train_step(buffers=…): {f.name} must return {what}")
            value = result[0] if has_aux else result
            for each, held in zip(self.requests, leaves, strict=True):
                value = each.loss(value, held)
            return (value, result), (P(owner=owners_of(f.applied)), specs)

        differentiated = as_local_function(grad_and_value(f.then(call), has_aux=True))
        found, (_, (_, specs)) = differentiated.run(resolved, params, *more, *batch)
        gradients, (_, result) = found
        parts: Any = (result, specs) if has_aux else ((result, None), (None, None))
        (value, aux), (_, specs) = parts
        if not more:
            return gradients, (value, aux, specs), list(leaves)
        (new, aux), (of_new, specs) = (aux, specs) if with_aux else ((aux, None), (specs, None))
        pairs = zip(self.requests, leaves, strict=True)
        after = [each.returned(new, of_new, held) if each.passed else held for each, held in pairs]
        return gradients, (value, aux, specs), after

    def _reduced(self, gradients: PyTree, leaves: Sequence[PyTree]) -> tuple[PyTree, torch.Tensor | None, PyTree]:
        """Return the gradients of the update, summed over ranks and clipped, their norm, and the sums alone."""
        layouts, clip = self.layouts, self.step.options.clip
        partial = optree.tree_map(P.dual, layouts.summed)  # of the parameters: ZeRO and data parallelism add gradients
        packed, on_device = layouts.packing.pack(gradients), optree.tree_map(P.in_compute, layouts.update)
        summed = sums = optree.tree_map(relayout_leaf, packed, partial, on_device, none_is_leaf=True)
        waiting = optree.tree_map(relayout_leaf, summed, on_device, layouts.gradients, none_is_leaf=True)
        moved = optree.tree_map(relayout_leaf, waiting, layouts.gradients, layouts.update, none_is_leaf=True)
        is_there = any(spec.memory != "device" for spec in optree.tree_leaves(layouts.counted))
        counted, specs = (waiting, layouts.gradients) if is_there else (summed, on_device)
        stays = optree.tree_leaves(specs) == optree.tree_leaves(layouts.update)
        for each, held in reversed([*zip(self.requests, leaves, strict=True)]):
            moved = each.gradients(moved, held)
            counted = moved if stays else each.gradients(counted, held)
        wanted = self.step.has_norm or clip is not None or any(each.may_skip for each in self.requests)
        norm = _norm(counted, layouts, specs) if wanted else None
        if clip is not None and norm is not None:
            factor = NumberBeside(torch.clamp(clip / (norm + 1e-6), max=1.0))
            moved = optree.tree_map(lambda g: g * factor(g).to(g.dtype), moved)
        return moved, norm, sums

    def _optimized(
        self, gradients: PyTree, stored: PyTree, state: PyTree, leaves: Sequence[PyTree], masks: PyTree
    ) -> Update:
        """Return the update by the optimizer. Untrained parameters and their state do not change."""
        weights = stored
        for each, held in zip(self.requests, leaves, strict=True):
            weights = each.weights(weights, held)
        layouts = self.layouts
        gradients = gradients if layouts.packing.groups else zeros_for(gradients, weights, layouts.frozen)
        specs = (layouts.update, split_state(self.state_specs, self.requests)[0], layouts.update)
        returned = layouts.packing.update(self.step.optimizer, gradients, state, weights, specs=specs)
        new, after = require_same_structure(returned, weights, state)
        return Update(
            old_weights(new, weights, masks), old_state(after, state, weights, masks), weights, state, stored, None
        )

    def _updated(self, update: Update, leaves: Sequence[PyTree]) -> tuple[Update, list[PyTree]]:
        """Return the update as the requests change it, the outermost first, and their new leaves."""
        after = list(leaves)
        for index in reversed(range(len(after))):
            update, after[index] = self.requests[index].updated(update, after[index])
        return update, after


def _norm(gradients: PyTree, layouts: StepLayout, held: SpecTree) -> torch.Tensor:
    if layouts.owners:
        return global_norm(gradients, layouts.counted, layouts.owners)
    parts = optree.tree_map(relayout_leaf, gradients, held, layouts.counted, none_is_leaf=True)
    return global_norm(parts, layouts.counted)


def _is_pair(result: PyTree) -> bool:
    return isinstance(result, tuple) and len(result) == 2
