"""Requests: their order, the scopes of passes, leaves of the state, and their text."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.functions import Request
from functional_parallel.ir import Traced
from functional_parallel.passes import Phase, ProgramPass, Scope, Unit
from functional_parallel.requests import RunPass, StateRequest, Update
from sharding_specs import Mesh

LAYERS = [torch.eye(4) * 0.5 for _ in range(4)]


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params:
        x = torch.tanh(x @ layer)
    return x.sum()


def sine(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params:
        x = torch.sin(x @ layer)
    return x.sum()


PIPELINE = fp.pipeline("pipe", schedule="1f1b", microbatches=2)
FULL = fp.chain(
    fp.mixed_precision("fp16", keep="0"),
    fp.remat(),
    fp.zero(2, "data"),
    fp.pipeline("pipe", schedule="1f1b", microbatches=2),
)


# -----------------------------------------------------------------------------
# Order and text
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner", "text"),
    [
        (fp.mixed_precision("bf16"), fp.zero(1, "data"), r"mixed_precision\('bf16'\) \(precision and remat\) stands"),
        (fp.remat(), fp.accumulate(2), r"stands outside accumulate\(2\) \(accumulate\), but belongs inside it"),
        (fp.zero(3, "data"), PIPELINE, r"\(zero / data\) stands outside pipeline\('pipe', '1f1b', 2\) \(pipeline\)"),
        (fp.remat(), lambda f: fp.grad_and_value(fp.accumulate(2)(f)), r"outside accumulate\(2\) → .*\(accumulate\)"),
    ],
)
def test_transforms_that_are_not_chained_have_the_same_order(outer: Any, inner: Any, text: str) -> None:
    outer(loss)
    with pytest.raises(fp.OrderError, match=text):
        outer(inner(loss))


def test_a_layout_has_the_order_of_its_outermost_transform() -> None:
    f: Any = loss
    for transform in FULL.transforms:
        f = transform(f)
        assert f.applied.order == fp.grad(f).applied.order == transform.order


def test_every_request_of_the_library_has_a_text() -> None:
    requests = FULL(loss).applied.requests
    assert all("object at 0x" not in str(each) and "(" not in str(each)[:1] for each in requests)


def test_explain_lists_the_requests() -> None:
    step = fp.compile(fp.grad(fp.chain(fp.remat(), fp.zero(3, "data"))(loss)), Mesh(data=2))
    shown = str(step.explain(LAYERS, torch.ones(4, 4)))
    said = "requested: pass 'remat'; batch sharded over 'data'; pass 'gathers'"
    assert shown.splitlines()[-1] == said


# -----------------------------------------------------------------------------
# Passes and their scopes
# -----------------------------------------------------------------------------


@dataclass(frozen=True)
class SineInstead(ProgramPass):
    """Replace tanh, to see where a pass runs."""

    seen: list[int] = field(default_factory=list, hash=False, compare=False)
    name: ClassVar[str] = "sine instead"
    phase: ClassVar[Phase] = Phase.SUMS

    def run(self, traced: Traced, mesh: Mesh) -> None:
        found = [node for node in traced.nodes if node.target is torch.ops.aten.tanh.default]
        for node in found:
            node.target = torch.ops.aten.sin.default
        self.seen.append(len(found))


@dataclass(frozen=True)
class SineInStages(SineInstead):
    """The same, in each program."""

    scope: ClassVar[Scope] = Scope.STAGE


@dataclass(frozen=True)
class SineInPairs(SineInstead):
    """The same, in forward and backward of a stage at once."""

    scope: ClassVar[Scope] = Scope.PAIR
    pairs: list[int] = field(default_factory=list, hash=False, compare=False)

    def rewrite(self, unit: Unit) -> str:
        super().rewrite(unit)
        self.pairs.append(len(unit.programs))
        return f"{len(unit.programs)} at once"


@pytest.mark.parametrize("run", [SineInstead(), SineInStages(), SineInPairs()], ids=lambda run: run.scope.value)
@pytest.mark.parametrize("pipe", [False, True])
def test_a_pass_runs_in_its_scope(run: SineInstead, pipe: bool) -> None:
    """On the step once, or on programs after the cut; the value is that of the rewritten function."""
    run.seen.clear()
    f = (PIPELINE(loss) if pipe else fp.data_parallel("data")(loss)).requesting(RunPass(run))
    step = fp.compile(f, Mesh(pipe=2) if pipe else Mesh(data=2))
    x = torch.ones(4, 4)
    torch.testing.assert_close(step(LAYERS, x), sine(LAYERS, x))
    if pipe and run.scope is not Scope.STEP:
        assert sum(run.seen) >= len(LAYERS) and max(run.seen) == len(LAYERS) // 2
    else:
        assert run.seen == [len(LAYERS)]
    assert "sine instead" in step.program.passes
    without = fp.compile(f, step.mesh, without="sine instead")
    torch.testing.assert_close(without(LAYERS, x), loss(LAYERS, x))


def test_a_pass_over_pairs_sees_forward_and_backward_of_each_stage() -> None:
    run = SineInPairs()
    step = fp.compile(fp.grad(PIPELINE(loss).requesting(RunPass(run))), Mesh(pipe=2))
    program = step.lower(LAYERS, torch.ones(4, 4))
    assert len(run.pairs) == len(program.stages) == 2 and min(run.pairs) >= 2
    assert "sine instead" in program.passes and "aten.tanh" not in str(program)
    assert f"{run.pairs[0]} at once" in program.stages[0].works["F"].first.program.notes
    plain = SineInPairs()
    fp.compile(fp.data_parallel("data")(loss).requesting(RunPass(plain)), Mesh(data=2)).lower(LAYERS, torch.ones(4, 4))
    assert plain.pairs == [1]


# -----------------------------------------------------------------------------
# Leaves of the state
# -----------------------------------------------------------------------------


class CountedState(NamedTuple):
    optimizer: Any
    count: Any


@dataclass(frozen=True)
class SmallerUpdates(StateRequest):
    """Count the steps, and move the parameters by half of each update."""

    tree: ClassVar[type[CountedState]] = CountedState

    def init(self, params: Any, applied: Any, layouts: Any) -> Any:
        return torch.zeros((), dtype=torch.int64)

    def updated(self, update: Update, leaves: Any) -> tuple[Update, Any]:
        half = optree.tree_map(lambda new, old: (new + old) / 2, update.params, update.old_params)
        return replace(update, params=half), leaves + 1


@pytest.mark.parametrize(
    "plan", [fp.zero(0, "data"), fp.zero(1, "data"), fp.zero(3, "data"), fp.zero(2, "data", layout="flat")]
)
def test_a_request_adds_leaves_to_the_state_and_changes_the_update(plan: Any) -> None:
    """Half of the updates of SGD is SGD at half the rate; the leaves are saved, loaded and may be new."""
    half = fp.train_step(plan(loss).requesting(SmallerUpdates()), fp.optim.sgd(0.5), Mesh(data=2))
    plain = fp.train_step(loss, fp.optim.sgd(0.25), Mesh(data=2), plan)
    states = [train.init(LAYERS) for train in (half, plain)]
    for _ in range(3):
        states = [train(state, torch.ones(4, 4))[0] for train, state in zip((half, plain), states, strict=True)]
    torch.testing.assert_close(half.params(states[0]), plain.params(states[1]))
    params, saved = half.whole(states[0])
    assert saved.count == 3
    again = half.load(params, saved, 3)
    assert half.whole(half(again, torch.ones(4, 4))[0])[1].count == 4
    assert half.whole(half.load(*plain.whole(states[1]), 3))[1].count == 0
    assert plain.whole(plain.load(params, saved, 3))[1] == plain.whole(states[1])[1]


def test_a_request_without_hooks_changes_nothing() -> None:
    f = fp.zero(1, "data")(loss)
    found = [fp.compile(g, Mesh(data=2)).lower(LAYERS, torch.ones(4, 4)) for g in (f, f.requesting(Request()))]
    assert found[0].lines() == found[1].lines()
