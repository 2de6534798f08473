"""Plans drawn at random for a random model, as plain data: pipe × data × tensor, with all that goes into each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import Schedule
from sharding_specs import Mesh, P

from ..pipelines.networks import SYNCHRONOUS
from .random_models import Model

Sizes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Choice:
    """A mesh and a plan.

    Attributes:
        sizes: of the mesh's axes, outermost first.
        zero: the stage of ZeRO, and its options.
        remat: what is computed again: arguments of fp.remat, or None.
        microbatches: of a step.
        reduce: when an accumulation sums over ranks.
        schedule: of the pipeline; None for accumulation.
        bucket: as for `train_step`.
    """

    sizes: Sizes
    zero: tuple[int, dict[str, Any]]
    remat: dict[str, Any] | None
    microbatches: int
    reduce: str
    schedule: Schedule | None
    bucket: int | str | None

    @property
    def mesh(self) -> Mesh:
        return Mesh(**dict(self.sizes))

    def plan(self, model: Model) -> Any:
        axes = dict(self.sizes)
        transforms = [] if self.remat is None else [fp.remat(**self.remat)]
        if "tensor" in axes:
            transforms.append(fp.tensor_parallel("tensor", model.specs()))
        if "data" in axes:
            transforms.append(fp.zero(self.zero[0], "data", **self.zero[1]))
        if self.schedule is not None:
            stacks = {"layers/*": P("pipe")} if model.stacked else None
            transforms.append(
                fp.pipeline("pipe", stacks, microbatches=self.schedule.microbatches, schedule=self.schedule)
            )
        elif self.microbatches > 1:
            transforms.append(fp.accumulate(self.microbatches, reduce=self.reduce))
        return fp.chain(*transforms)


@st.composite
def choices(draw: st.DrawFn, model: Model, ranks: int | None = None) -> Choice:
    """Any plan that a model's layers allow.

    Args:
        draw: hypothesis's.
        model: the model.
        ranks: how many the mesh shall have; any number by default.
    """
    microbatches = draw(st.integers(1, 4))
    depths = [1, *([len(model.marks) + 1] if model.marks else [2] if model.stacked or len(model.kinds) < 4 else [2, 3])]
    options = [
        (pipe, data, tensor)
        for pipe in depths
        for data in (1, 2, 3, 4)
        for tensor in (1, 2, 4)
        if (ranks or pipe * data * tensor) == pipe * data * tensor <= 12
    ]
    pipe, data, tensor = draw(st.sampled_from(options))
    schedule = draw(_schedules(model, pipe, microbatches)) if pipe > 1 else None
    sizes = {"pipe": pipe, "data": data, "tensor": tensor}
    named = [(axis, size) for axis, size in sizes.items() if size > 1 or (axis == "tensor" and model.sequence)]
    return Choice(
        tuple(draw(st.permutations(named))) or (("data", 1),),
        draw(_zeros(pipe)),
        draw(st.sampled_from([None, {"policy": "layers"}, {"policy": "layers", "every": 2}, {"policy": "attention"}])),
        microbatches if schedule is None else schedule.microbatches,
        draw(st.sampled_from(["once", "each"])),
        schedule,
        draw(st.sampled_from(["auto", None, 256])),
    )


@st.composite
def _schedules(draw: st.DrawFn, model: Model, ranks: int, microbatches: int) -> Schedule:
    """Of one stage per rank where the model says where it is cut, or where two each would be more than its layers."""
    name = draw(st.sampled_from(SYNCHRONOUS))
    try:
        made = schedules.for_ranks(name, ranks, microbatches + ranks)
    except ScheduleError:  # it wants other numbers
        made = schedules.for_ranks("1f1b", ranks, microbatches + 1)
    cut = len(model.marks) + 1 if model.marks else len(model.kinds)
    fits = made.depth == cut if model.marks else made.depth <= cut and (not model.stacked or cut % made.depth == 0)
    return made if fits else schedules.for_ranks("zb-h1", ranks, microbatches + 1)


@st.composite
def _zeros(draw: st.DrawFn, pipe: int) -> tuple[int, dict[str, Any]]:
    stage = draw(st.integers(0, 3))
    if stage == 3:
        return stage, {
            "keep_gathered": draw(st.booleans()),
            "prefetch": draw(st.integers(0, 2)),
            "whole_below": draw(st.sampled_from([0, 20])),
        }
    flat = stage > 0 and pipe == 1 and draw(st.booleans())
    return stage, {"layout": "flat"} if flat else {}
