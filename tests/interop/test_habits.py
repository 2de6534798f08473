"""What torch does beside values: each row of the table of docs/migration.md, against a loop of torch."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

import functional_parallel as fp

from ..migration.loops import Eager, Loop, Prepared, batch
from ..migration.of_torch import NO_EFFECT, REFUSED, ROWS, Habit


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


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Detected call of `lr_scheduler.step")
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
