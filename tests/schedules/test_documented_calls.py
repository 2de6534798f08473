"""Calls of schedules in texts have arguments that the functions take: schedules of pipelines and of learning rates."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import functional_parallel as fp
from functional_parallel import schedules

ROOT = Path(__file__).parent.parent.parent
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
TEXTS += sorted((ROOT / "functional_parallel").rglob("*.py"))
OPTIMIZERS = ROOT / "docs" / "optimizers.md"
NAMES = {name: made for name in schedules.__all__ if callable(made := getattr(schedules, name))}
NAMES |= {"pipeline": fp.pipeline, "layer_costs": fp.layer_costs, "search_pipeline": fp.search_pipeline}
_CALL = re.compile(r"(?<![\w.])((?:fp\.)?(?:schedules\.)?(\w+))\(")


RATES = {name: getattr(fp.optim.schedules, name) for name in fp.optim.schedules.__all__}


def calls(text: str, names: dict[str, Callable[..., Any]]) -> Iterator[tuple[ast.Call, Callable[..., Any]]]:
    """The calls of schedules' functions in backticks or at a prompt that are Python."""
    for line in re.findall(r"`+([^`\n]+)`+|(?:>>>|\.\.\.) (.+)", text):
        source = "".join(line)
        for found in _CALL.finditer(source):
            prefix, name = found[1].rpartition(".")[0], found[2]
            if name not in names or (prefix == "" and name in ("plot", "search", "get", "check", "rows", "messages")):
                continue  # such a name without a module is another function
            if prefix == "fp" and getattr(fp, name, names[name]) is not names[name]:
                continue  # as is this one
            for end in (index + 1 for index in range(found.end(), len(source)) if source[index] == ")"):
                try:
                    node = ast.parse(source[found.start() : end].replace("…", "..."), mode="eval").body
                except SyntaxError:
                    continue
                if isinstance(node, ast.Call):
                    yield node, names[name]
                    break


def fault(call: ast.Call, function: Callable[..., Any]) -> str | None:
    """Why a function does not take the arguments of a call; an ellipsis stands for any."""
    if any(isinstance(each, ast.Constant) and each.value is ... for each in call.args):
        return None
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return None
    try:
        inspect.signature(function).bind(*call.args, **{each.arg: each.value for each in call.keywords if each.arg})
    except TypeError as error:
        return f"{ast.unparse(call)}: {error}"
    return None


@pytest.mark.parametrize(("texts", "names", "least"), [(TEXTS, NAMES, 60), ([OPTIMIZERS], RATES, 14)])
def test_documented_calls_have_the_arguments_of_the_functions(
    texts: list[Path], names: dict[str, Callable[..., Any]], least: int
) -> None:
    found = [(path, call, function) for path in texts for call, function in calls(path.read_text(), names)]
    faults = [f"{path.relative_to(ROOT)}: {why}" for path, call, function in found if (why := fault(call, function))]
    assert not faults, "\n".join(faults)
    assert len(found) >= least
