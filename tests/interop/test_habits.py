"""What torch does beside values: each row of the table of docs/migration.md, against a loop of torch."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import functional_parallel as fp

from ..migration.loops import Eager, Loop, Prepared, batch
from ..migration.of_torch import NO_EFFECT, READS, REFUSED, ROWS, Habit

QUIET = pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing",
    "ignore:Detected call of `lr_scheduler.step",
    "ignore:Called `lr_scheduler.step",
)


@pytest.fixture(autouse=True)
def validated() -> Iterator[None]:
    """torch.compile switches checks of distributions off for good."""
    yield
    torch.distributions.Distribution.set_default_validate_args(__debug__)


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return any(not torch.allclose(one[name], other[name], rtol=0, atol=1e-10) for name in one if name in other)


def run(kind: type[Loop], row: Habit, *, without: bool = False) -> tuple[list[dict[str, torch.Tensor]], Loop]:
    """Parameters after each of three steps, with the habit before the first or the second one."""
    do = (lambda loop: None) if without else row.do
    loop = kind(**row.loop, before=do if row.before else None)
    found = []
    try:
        for number in range(3):
            if number == 1 and not row.before:
                do(loop)
            loop.step(batch(number))
            found.append(loop.parameters())
            loop.evaluate(batch(number))
    finally:
        if "handle" in loop.kept:
            loop.kept["handle"].remove()
    return found, loop


@QUIET
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.verdict}: {' '.join(row.names.values())[:60]}")
def test_a_row_holds(row: Habit) -> None:
    untouched, _ = run(Eager, row, without=True)
    try:
        torchs, _ = run(Eager, row)
        has_effect = differ(torchs[-1], untouched[-1])
    except RuntimeError:  # of torch, about dtypes
        has_effect = True
    assert has_effect == (row.verdict != NO_EFFECT and not row.recorded), "what torch does"
    if row.verdict == REFUSED:
        with pytest.raises(fp.errors.SideEffectError, match=row.match):
            run(Prepared, row)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, _ = run(Prepared, row)
    texts = [str(each.message) for each in caught if each.category is fp.errors.SideEffectWarning]
    assert len(texts) == bool(row.match) and all(re.search(row.match, text) for text in texts)
    for mine, other in zip(found, torchs, strict=True):
        assert not differ(mine, other)


# -----------------------------------------------------------------------------
# Every public name
# -----------------------------------------------------------------------------


def schedulers() -> list[lr_scheduler.LRScheduler]:
    def made(kind: Any, *args: Any) -> lr_scheduler.LRScheduler:
        return kind(torch.optim.SGD([torch.ones(1)], 0.1, momentum=0.5), *args)

    one = made(lr_scheduler.ConstantLR)
    return [
        one,
        made(lr_scheduler.LambdaLR, lambda n: 1.0),
        made(lr_scheduler.MultiplicativeLR, lambda n: 1.0),
        made(lr_scheduler.StepLR, 2),
        made(lr_scheduler.MultiStepLR, [2]),
        made(lr_scheduler.LinearLR),
        made(lr_scheduler.ExponentialLR, 0.5),
        made(lr_scheduler.CosineAnnealingLR, 2),
        made(lr_scheduler.CosineAnnealingWarmRestarts, 2),
        made(lr_scheduler.PolynomialLR),
        made(lr_scheduler.CyclicLR, 0.1, 0.2),
        made(lr_scheduler.OneCycleLR, 0.2, 9),
        lr_scheduler.SequentialLR(one.optimizer, [one], []),
        lr_scheduler.ChainedScheduler([one], one.optimizer),
    ]


def optimizers() -> list[torch.optim.Optimizer]:
    kinds = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adafactor)
    return [kind([torch.ones(1)], 0.1) for kind in kinds]


OBJECTS: dict[str, Callable[[], list[Any]]] = {
    "Module": lambda: [nn.Module()],
    "Optimizer": optimizers,
    "LRScheduler": schedulers,
    "Tensor": lambda: [nn.Parameter(torch.ones(1))],
}


def is_named(name: str, patterns: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns.split())


def is_public_in_torch(each: Any, name: str) -> bool:
    """transformers adds a method to `torch.nn.Module` once it has initialised a model."""
    home = getattr(getattr(type(each), name, None), "__module__", None) or "torch"
    return not name.startswith("_") and home.partition(".")[0] in ("torch", "typing", "builtins")


@pytest.mark.parametrize("kind", OBJECTS)
def test_every_public_name_has_a_row(kind: str) -> None:
    rows = " ".join(row.names.get(kind, "") for row in ROWS)
    found = {name: each for each in OBJECTS[kind]() for name in dir(each) if is_public_in_torch(each, name)}
    missing = [name for name, each in found.items() if not is_named(name, rows) and not is_pure(kind, each, name)]
    assert not missing, "give each a row in tests/migration/of_torch.py"
    for pattern in rows.split():
        assert "*" not in pattern or any(fnmatch(name, pattern) for name in found), pattern


def test_a_method_that_another_library_added_needs_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def smart_apply(module: nn.Module) -> None: ...

    monkeypatch.setattr(nn.Module, "smart_apply", smart_apply, raising=False)
    assert not is_public_in_torch(nn.Module(), "smart_apply") and is_public_in_torch(nn.Module(), "apply")


def test_a_name_without_a_row_is_found() -> None:
    assert not is_pure("Tensor", torch.ones(1), "mul_") and not is_pure("Tensor", torch.ones(1), "register_hook")
    assert not is_pure("Module", nn.Module(), "register_buffer")


def is_pure(kind: str, found: Any, name: str) -> bool:
    """Whether a name needs no row: an op of aten that writes nothing, a class, or an attribute of a scheduler."""
    if kind == "LRScheduler":  # the last row has them
        return not inspect.ismethod(getattr(found, name))
    if kind == "Optimizer":
        return inspect.isclass(getattr(found, name)) or name in ("OptimizerPreHook", "OptimizerPostHook")  # of types
    if kind == "Tensor" and not is_named(name, READS):
        op = getattr(torch.ops.aten, name, None)
        overloads = (
            [getattr(op, each) for each in op.overloads()] if isinstance(op, torch._ops.OpOverloadPacket) else []
        )
        plain = [each for each in overloads if "out" not in each._overloadname]
        return bool(plain) and not any(each._schema.is_mutable for each in plain)
    return kind == "Tensor"


# -----------------------------------------------------------------------------
# Law: any habits between any steps, as in torch or refused
# -----------------------------------------------------------------------------

DRAWN = [row for row in ROWS if not (row.loop or row.before or any(kind.startswith("torch.") for kind in row.names))]
FOLLOWED = [row for row in DRAWN if row.verdict != REFUSED]
PLANS = {"data": fp.data_parallel("data"), "zero": fp.zero(3, "data")}


class Drawn(Prepared):
    chosen = "data"

    def begin(self) -> None:
        self.plan = PLANS[self.chosen]
        super().begin()


def require_no_silent_difference(plan: str, optimizer: str, steps: list[tuple[bool, bool, list[Habit]]]) -> None:
    """Take steps in both loops, with habits before each; `looks` brings the parameters into the module after it."""
    kind = type("Drawn", (Drawn,), {"chosen": plan})
    loops = [kind(optimizer), Eager(optimizer)]
    for number, (looks, evaluates, habits) in enumerate(steps):
        try:
            for habit in habits:
                try:
                    habit.do(loops[1])
                except RuntimeError:
                    return  # torch refuses it after those before
                habit.do(loops[0])
            found = [loop.step(batch(number)) for loop in loops]
            evaluated = [loop.evaluate(batch(number)) for loop in loops if evaluates]
        except fp.errors.SideEffectError:
            return
        torch.testing.assert_close(*found, rtol=0, atol=1e-10)
        if evaluates:
            torch.testing.assert_close(*evaluated, rtol=0, atol=1e-10)
        if looks:
            assert not differ(*(loop.parameters() for loop in loops))


habits = st.lists(st.sampled_from(FOLLOWED) | st.sampled_from(FOLLOWED) | st.sampled_from(DRAWN), max_size=2)
drawn = given(
    st.sampled_from([*PLANS]),
    st.sampled_from(["sgd", "momentum", "adamw"]),
    st.lists(st.tuples(st.booleans(), st.booleans(), habits), min_size=2, max_size=4),
)


@QUIET
@pytest.mark.filterwarnings("ignore::functional_parallel.errors.SideEffectWarning")
@settings(max_examples=6)
@drawn
def test_habits_in_any_order_are_followed_or_refused(plan: str, optimizer: str, steps: Any) -> None:
    require_no_silent_difference(plan, optimizer, steps)


@QUIET
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::functional_parallel.errors.SideEffectWarning")
@settings(max_examples=60)
@drawn
def test_habits_in_many_orders(plan: str, optimizer: str, steps: Any) -> None:
    require_no_silent_difference(plan, optimizer, steps)


# -----------------------------------------------------------------------------
# What the comparison costs
# -----------------------------------------------------------------------------
