"""Law: a program whose layers are marked by `fp.repeated` is the program without marks, and without repeats.

Text, source lines and all other facts of each op, counts, bytes and peak are equal, and values to the bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import optree
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import functional_parallel as fp
from functional_parallel.ir import without_repeats
from functional_parallel.tracing import RecordedCall

from ..some_cases import one_in
from ..tracing.test_repeated import ran, recorded
from . import layered_models
from .layered_models import LAYERED, as_it_is
from .random_models import KINDS, Model, models
from .test_repeats import PLANS, UNSUPPORTED, assert_same_programs, gradient_of

UNMARKED = {"dense", "unbound", "unread results", "cut off", "stacked, in slices"}  # their layers are no functions
TRACED = {"top k", "modules"}  # torch asks for values in `one_hot`; modules are not marked


@one_in(31, name=[name for name in LAYERED if name not in UNMARKED], plan=PLANS)
def test_of_layered_models(name: str, plan: str) -> None:
    if (name, plan) in UNSUPPORTED:
        pytest.skip("refused without marks too")
    make, args = gradient_of(LAYERED[name], plan)
    copied: list[Any] = []
    copy = RecordedCall.copied

    def counted(known: RecordedCall, call: Any) -> Any:
        copied.append(call)
        return copy(known, call)

    found = []
    for by, without in ((fp.repeated, ()), (as_it_is, "repeats")):  # on one line, which some ops have
        with patch.object(layered_models, "mark", by), patch.object(RecordedCall, "copied", counted):
            step = make(without)
            found.append((step.lower(*args), optree.tree_leaves(step(*args))))
    (made, mine), (wanted, theirs) = found
    assert bool(copied) is (name not in TRACED)
    assert_same_programs(made, wanted)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def with_marks(kind: str) -> Any:
    apply = KINDS[kind].apply

    def layer(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
        ran()
        return apply(w, x, beside)

    return KINDS[kind]._replace(apply=fp.repeated(layer))


@settings(deadline=None, max_examples=10)
@given(model=models(most=3))
def test_marks_do_not_change_a_trace(model: Model) -> None:
    """Each kind of layer is run twice, however often it occurs."""
    model = replace(model, kinds=model.kinds * (1 if model.stacked else 3), marks=())

    def loss(params: Any, batch: Any, key: Tensor) -> Tensor:
        with fp.random.using(key):
            return model(params, batch)[0]

    args = model.parameters(), model.batch(0, 4), fp.random.key(0)
    with patch.dict(KINDS, {kind: with_marks(kind) for kind in model.kinds}):
        with without_repeats():
            wanted, every = recorded(loss, *args)
        found, runs = recorded(loss, *args)
    assert found == wanted
    assert every == len(model.kinds)
    assert runs == sum(min(2, model.kinds.count(kind)) for kind in {*model.kinds})
