"""docs/from_loss_to_collectives.md names functions that exist, in the order in which a step calls them.

Its blocks run in `test_docs`, so that the lines of programs are the real ones. Here a profiler notes the calls.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P

from .processes import run_on_processes

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "from_loss_to_collectives.md").read_text()
MENTION = re.compile(r"\*\*`([\w/]+\.py): ([\w.]+)`\*\*")
COMMON, _, RANKS = TEXT.partition("## On real processes")
SIMULATED = COMMON.index("## A rank runs the program")
Function = tuple[str, int]  # file and first line


def path_of(file: str) -> Path:
    return ROOT / file if file.startswith("sharding_specs/") else ROOT / "functional_parallel" / file


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the qualified name of each function and method, with its first line, that of a decorator included."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", min([node.lineno, *(each.lineno for each in node.decorator_list)])


def functions(text: str) -> list[tuple[str, Function]]:
    """Return the functions that a text names, in its order."""
    found = []
    for file, name in MENTION.findall(text):
        known = dict(definitions(ast.parse(path_of(file).read_text()).body))
        assert name in known, f"the page names {file}: {name}, which the file does not have"
        found.append((f"{file}: {name}", (str(path_of(file)), known[name])))
    return found


def calls_of(run: Callable[[], Any]) -> list[Function]:
    """Return the functions that a run calls, in order."""
    calls: list[Function] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.append((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def first_missing(named: list[tuple[str, Function]], calls: list[Function]) -> str | None:
    """Return the first function that is not called after those before it."""
    remaining = iter(calls)
    return next((name for name, function in named if function not in remaining), None)


def step(mesh: Mesh) -> None:
    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return ((x @ params["up"]).relu() @ params["down"]).square().mean()

    rules = {"up": P(None, "tensor"), "down": P("tensor", None)}
    plan = fp.chain(fp.mixed_precision("bf16"), fp.tensor_parallel("tensor", rules), fp.zero(3, "data"))
    train = fp.train_step(loss, fp.optim.sgd(0.5), mesh, plan)
    train(train.init({"up": torch.arange(32.0).view(4, 8) / 32, "down": torch.ones(8, 2)}), torch.eye(4))


def test_every_function_in_bold_is_one_of_a_file() -> None:
    assert len(functions(COMMON)) >= 30 and len(functions(RANKS)) >= 3
    assert TEXT.count(".py: ") == len(MENTION.findall(TEXT))


def test_a_step_calls_them_in_this_order() -> None:
    calls = calls_of(lambda: step(Mesh(data=2, tensor=2)))
    assert first_missing(functions(COMMON), calls) is None
    named = functions(COMMON)
    assert first_missing([named[1], named[0]], calls) == named[0][0]  # another order is noticed


def on_rank(rank: int) -> str | None:
    os.environ["FUNCTIONAL_PARALLEL_ALGORITHM"] = "backend"
    calls = calls_of(lambda: step(Mesh(data=2, tensor=1)))
    return first_missing(functions(COMMON[:SIMULATED]) + functions(RANKS), calls)


def test_a_rank_calls_those_of_real_processes() -> None:
    assert run_on_processes(on_rank, 2) == [None, None]


@pytest.mark.parametrize("page", ["docs/README.md", "CONTRIBUTING.md"])
def test_it_is_linked(page: str) -> None:
    assert "from_loss_to_collectives.md)" in (ROOT / page).read_text()
