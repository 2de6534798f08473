"""Mutation testing: small changes of the library, and the share of them that the tests detect.

`python -m tests.mutants` draws mutants of functions in collectives, partition and passes. One run of all tests finds
the tests that enter the function of each mutant. Each mutant then runs against these tests only.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "draw", "mutants_of", "mutated", "probed"]

ROOT = Path(__file__).parent.parent
PACKAGES = ("collectives", "partition", "passes")
COPIED = ("functional_parallel", "sharding_specs", "tests", "docs", "examples", "benchmarks")
FIRST, MOST = 25, 250  # tests that run first, one per file in turn, and at most
LIMIT = 600  # seconds

_COMPARED = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add}
_OPERATORS = (ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp)
_UNTESTED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)  # wording of messages, and types


@dataclass(frozen=True)
class Mutant:
    """`old`, at these positions in a file, is replaced by `new`. `function` is the line of the function's first op."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    function: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {' '.join(self.old.split())!r} → {' '.join(self.new.split())!r}"


def mutants_of(file: str, text: str) -> list[Mutant]:
    """All mutants of the functions in a file."""
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and not function.name.startswith("__"):
            body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
            for node in (each for statement in body for each in _nodes(statement)):
                for old, new in _changes(node):
                    start = starts[old.lineno - 1] + old.col_offset
                    end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
                    replacement = f"({ast.unparse(new)})" if isinstance(new, _OPERATORS) else ast.unparse(new)
                    original = text.encode()[start:end].decode()
                    found.append(Mutant(file, old.lineno, start, end, original, replacement, body[0].lineno))
    return found


def _nodes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The nodes of a function's body, without nested functions, messages and annotations."""
    if isinstance(node, (*_UNTESTED, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _nodes(each)


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Pairs of a node, or its condition, and its replacement."""
    changed = copy.copy(node)
    match changed:
        case ast.Compare(ops=[op]) if type(op) in _COMPARED:
            changed.ops = [_COMPARED[type(op)]()]
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
        case ast.BinOp() if type(changed.op) in _COMPUTED:
            changed.op = _COMPUTED[type(changed.op)]()
        case ast.Constant(value=bool()):
            changed.value = not changed.value
        case ast.Constant(value=int()):
            changed.value = changed.value + 1
        case ast.Return(value=ast.expr()):
            changed.value = ast.Constant(None)
        case ast.Expr(value=ast.Call()):
            yield node, ast.Pass()
            return
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(changed.test, (ast.Compare, ast.BoolOp)):
            yield changed.test, ast.UnaryOp(ast.Not(), changed.test)
            return
        case _:
            return
    yield node, changed


def draw(count: int, seed: int, root: Path = ROOT) -> list[Mutant]:
    """A random sample of the mutants of all packages."""
    files = sorted(each for package in PACKAGES for each in (root / "functional_parallel" / package).rglob("*.py"))
    every = [mutant for each in files for mutant in mutants_of(str(each.relative_to(root)), each.read_text())]
    return random.Random(seed).sample(every, count)


def mutated(text: str, mutant: Mutant) -> str:
    """A file's text with the mutant in it."""
    data = text.encode()
    return (data[: mutant.start] + mutant.new.encode() + data[mutant.end :]).decode()


def probed(text: str, lines: dict[int, list[int]]) -> str:
    """A file's text in which each function that has mutants reports a call. `lines` has its first line's mutants."""
    changed = text.splitlines(keepends=True)
    for line, numbers in lines.items():
        indent = changed[line - 1][: len(changed[line - 1]) - len(changed[line - 1].lstrip())]
        changed[line - 1] = f"{indent}__import__('mutant_probe').entered({numbers})\n{changed[line - 1]}"
    return "".join(changed)


_PROBE = """
import os
seen = set()
def entered(numbers):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
    if (key := (numbers[0], test)) not in seen and test:
        seen.add(key)
        with open(os.environ["MUTANT_CALLS"], "a") as file:
            file.write("".join(f"{number} {test}\\n" for number in numbers))
"""


def _copied(to: Path, root: Path = ROOT) -> Path:
    for name in COPIED:
        shutil.copytree(root / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in root.iterdir():
        if file.is_file():
            shutil.copy(file, to)
    return to


def _pytest(folder: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """The exit status of pytest, -1 after the time limit, and its output."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *arguments]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            return process.wait(LIMIT if "-x" in arguments else None), process.communicate()[0]
        except subprocess.TimeoutExpired:
            process.kill()
            return -1, ""


def _covering(mutants: list[Mutant], workers: int) -> list[list[str]]:
    """The tests that enter each mutant's function, in the order in which they run against it."""
    with tempfile.TemporaryDirectory() as folder:
        copied = _copied(Path(folder))
        sites: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, mutant in enumerate(mutants):
            sites[mutant.file][mutant.function].append(number)
        for file, lines in sites.items():
            (copied / file).write_text(probed((copied / file).read_text(), lines))
        (copied / "mutant_probe.py").write_text(_PROBE)
        calls = copied / "calls.txt"
        calls.touch()
        _, output = _pytest(copied, "-n", str(workers), MUTANT_CALLS=str(calls))
        failing = {line.split(" ")[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))}
        print(f"{len(failing)} tests fail with the probes in place and are left out: {sorted(failing)}", flush=True)
        found: list[dict[str, None]] = [{} for _ in mutants]
        for line in calls.read_text().splitlines():
            number, test = line.split(" ", 1)
            if test not in failing:
                found[int(number)][test] = None
    return [_by_turns(list(each)) for each in found]


def _by_turns(tests: list[str]) -> list[str]:
    """One test of each file in turn, because tests of one file are alike."""
    files: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)
    turns = max(map(len, files.values()), default=0)
    return [each[turn] for turn in range(turns) for each in files.values() if turn < len(each)]


def _killed(folder: Path, mutant: Mutant, tests: list[str]) -> bool:
    file = folder / mutant.file
    text = file.read_text()
    file.write_text(mutated(text, mutant))
    try:
        for chosen in (tests[:FIRST], tests[FIRST:MOST]):
            if chosen and _pytest(folder, "-x", *chosen)[0] != 0:
                return True
    finally:
        file.write_text(text)
    return False


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    mutants = draw(options.count, options.seed)
    covering = _covering(mutants, options.workers)
    with tempfile.TemporaryDirectory() as root:
        folders: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(options.workers):
            folders.put(_copied(Path(root) / str(number)))

        def judged(pair: tuple[Mutant, list[str]]) -> bool:
            mutant, tests = pair
            folder = folders.get()
            began = time.monotonic()
            killed = _killed(folder, mutant, tests)
            folders.put(folder)
            verdict = "killed" if killed else "ALIVE"
            print(f"{verdict:7}{time.monotonic() - began:5.0f} s {len(tests):5} tests  {mutant}", flush=True)
            return killed

        with ThreadPoolExecutor(options.workers) as pool:
            killed = sum(pool.map(judged, zip(mutants, covering, strict=True)))
    print(f"{killed} of {len(mutants)} mutants killed ({killed / len(mutants):.0%})")


if __name__ == "__main__":
    main()
