"""Training step on one rank's shards: gradient, clipping, optimizer.

It converts parameters between their storage, compute and update layouts. The types of the intermediate values determine
the collectives.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import optree
import torch

from sharding_specs import P

from .. import random
from ..functions import LocalFunction, PyTree, SpecTree, grad_and_value
from ..optim import Optimizer, skips_untrained
from .options import StepOptions
from .untrained import old_params, old_state, report_untrained, untrained, without
from .update import (
    ScaledState,
    StepLayout,
    gather_updated,
    global_norm,
    into_compute,
    reduce_gradient,
    require_same_structure,
    scaled_loss,
    select_unless,
    shard_for_update,
    unscaled,
)

__all__ = ["LocalTrainStep", "Metrics"]


class Metrics(NamedTuple):
    """Results of a step, as full tensors on every rank.

    An asynchronous pipeline has no gradient norm. Its loss and aux are means over the updates of the step.

    Attributes:
        loss: the loss, without loss scale.
        grad_norm: global norm of the gradients, without loss scale; None if it is not computed.
        aux: aux of the loss; None without `has_aux`.
        skipped: whether gradients overflowed, so that nothing was updated; None without a loss scale.
        loss_scale: factor of the loss in this step; None without a loss scale.
    """

    loss: Any
    grad_norm: Any
    aux: PyTree = None
    skipped: Any = None
    loss_scale: Any = None


@dataclass(frozen=True)
class LocalTrainStep:
    """Training step of a loss.

    Attributes:
        f: the loss, local.
        optimizer: the optimizer, as for `train_step`.
        options: the step's options.
        has_norm: whether the gradient's norm is reported.
        warned: parameters and closed-over tensors named by earlier warnings; extended.
    """

    f: LocalFunction
    optimizer: Optimizer
    options: StepOptions
    has_norm: bool
    warned: set[str] = field(default_factory=set)

    def on(self, places: StepLayout, state_specs: SpecTree) -> LocalFunction:
        """Return the step as a function of ((parameters, state), batch, key) to ((parameters, state), metrics).

        Args:
            places: layouts of parameters and gradients.
            state_specs: spec of each leaf of the state.
        """

        def call(held: tuple[PyTree, PyTree], batch: tuple[PyTree, ...], key: Any) -> Any:
            new, metrics = self._stepped(places, state_specs, held, batch, key)
            return (new, metrics), ((places.kept, state_specs), self._metric_specs(metrics))

        def arguments(args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
            (params, _), batch, _ = args
            return ((places.kept, state_specs), tuple(self.f.layout.arguments((params, *batch))[1:]), P())

        layout = replace(self.f.layout, arguments=arguments, update_axes=(), update_specs=None)
        return LocalFunction(call, layout, "train_step")

    def _stepped(
        self,
        places: StepLayout,
        state_specs: SpecTree,
        held: tuple[PyTree, PyTree],
        batch: tuple[PyTree, ...],
        key: Any,
    ) -> tuple[tuple[PyTree, PyTree], Metrics]:
        params, state = held
        scale = state.loss_scale if isinstance(state, ScaledState) else None
        inputs = optree.tree_map(into_compute, params, places.compute)
        with random.using(key) if key is not None else nullcontext():
            gradients, value, aux = self._gradients(inputs, batch, scale)
        idle = untrained(inputs, gradients)
        report_untrained(self.f.name, params, idle, self.warned)
        if skips_untrained(self.optimizer.update) and not places.packing.groups:
            gradients = without(gradients, idle)
        gradients = places.packing.pack(gradients)
        gradients = optree.tree_map(
            reduce_gradient, gradients, places.update, places.whole, places.summed, none_is_leaf=True
        )
        gradients = gradients if scale is None else unscaled(gradients, scale.scale)
        wanted = self.has_norm or self.options.clip is not None or scale is not None
        norm: Any = _norm(gradients, places) if wanted else None
        if self.options.clip is not None:
            factor = torch.clamp(self.options.clip / (norm + 1e-6), max=1.0)
            gradients = optree.tree_map(lambda g: g * factor.to(g.dtype), gradients)
        own = optree.tree_map(shard_for_update, places.packing.pack(params), places.update, places.whole)
        before, lies = (state, state_specs) if scale is None else (state.optimizer, state_specs.optimizer)
        specs = (places.update, lies, places.update)
        returned = places.packing.update(self.optimizer, gradients, before, own, specs=specs)
        new, after = require_same_structure(returned, own, before)
        masks = optree.tree_map(shard_for_update, places.packing.masks(idle), places.update, places.whole)
        after = old_state(after, before, own, masks)
        metrics = Metrics(value, norm, aux)
        if scale is not None:
            overflow = ~torch.isfinite(norm)  # a sum over all ranks, so all of them agree
            new, after = select_unless(overflow, new, own), select_unless(overflow, after, before)
            after = ScaledState(after, self.f.layout.loss_scale.update(scale, overflow))
            metrics = metrics._replace(skipped=overflow, loss_scale=scale.scale)
        new = places.packing.unpack(optree.tree_map(gather_updated, new, places.update, places.whole))
        return (old_params(new, params, idle), after), metrics

    def _gradients(self, params: PyTree, batch: tuple[PyTree, ...], scale: Any) -> tuple[PyTree, Any, PyTree]:
        """Return the gradients of the loss, times the loss scale if there is one; the loss; and its aux."""
        if scale is None:
            gradients, value = grad_and_value(self.f, has_aux=self.options.has_aux)(params, *batch)
        else:
            f = scaled_loss(self.f, scale.scale, self.options.has_aux)
            gradients, (_, value) = grad_and_value(f, has_aux=True)(params, *batch)
        return (gradients, *value) if self.options.has_aux else (gradients, value, None)

    def _metric_specs(self, metrics: Metrics) -> Metrics:
        aux = None if metrics.aux is None else self.f.results[1]
        return Metrics(*(None if each is None else P() for each in metrics))._replace(aux=aux)


def _norm(gradients: PyTree, places: StepLayout) -> torch.Tensor:
    parts = optree.tree_map(shard_for_update, gradients, places.counted, places.update, none_is_leaf=True)
    return global_norm(parts, places.counted)
