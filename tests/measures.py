"""Sizes of the library, its repetitions, and the calls that resolve layouts in a first step, read from a checkout.

    python -m tests.measures                    # of this checkout
    python -m tests.measures BEFORE AFTER       # of two checkouts, side by side

It reads the code of any version. `count_calls` runs one first step in the checkout's own library.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["measures"]

LIBRARIES = ("functional_parallel", "sharding_specs")
# a collective's operand is args[0]; axes, dims and states follow, so only a collective's (or a view's) are read so
POSITIONAL = re.compile(r"\b(?:node|call|gather|total|user|sum_|each|found|other|site)\.args\[(?:[1-9]|1:|2:)")
PLACEMENTS = {"owner": re.compile(r"\bowner\b|Owned\b"), "flat": re.compile(r"\bflat\b|\bVector\b")}
STEP = """
import json, sys, torch
import functional_parallel as fp
from sharding_specs import Mesh, P
from functional_parallel.functions import local_function

counts = {"calls that resolve layouts": 0, "calls of broadcast_specs": 0}
resolve = getattr(local_function.LocalFunction, "resolve", None)
if resolve is None:  # layouts are a function in a field, read for each call
    def counted(self, name):
        counts["calls that resolve layouts"] += name == "arguments"
        return object.__getattribute__(self, name)

    local_function.Layout.__getattribute__ = counted

def watch(frame, event, _):
    if event == "call":
        code = frame.f_code
        counts["calls of broadcast_specs"] += code.co_name == "broadcast_specs"
        if resolve is not None:
            counts["calls that resolve layouts"] += code is getattr(resolve, "__wrapped__", resolve).__code__

def loss(p, x):
    for w in p:
        x = torch.tanh(x @ w)
    return x.square().mean()

specs = [P(None, "tensor") if i % 2 == 0 else P("tensor") for i in range(8)]
plan = fp.chain(fp.mixed_precision("bf16"), fp.remat(), fp.tensor_parallel("tensor", specs),
                fp.zero(3, "shard"), fp.data_parallel("data"), fp.accumulate(2))
train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2, shard=2, tensor=2), plan)
state = train.init([torch.ones(8, 8) for _ in range(8)])
batch = torch.ones(16, 8)
counts.update(dict.fromkeys(counts, 0))
sys.setprofile(watch)
train(state, batch)
sys.setprofile(None)
print(json.dumps(counts))
"""


def files(root: Path) -> list[Path]:
    return [path for name in LIBRARIES for path in sorted((root / name).rglob("*.py"))]


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            first = node.body[0]
            assert isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            yield first.value


def methods(classes: Mapping[str, ast.ClassDef], name: str) -> set[str]:
    """Return the methods and properties of a class, with those of its bases in the library."""
    own = {each.name for each in classes[name].body if isinstance(each, ast.FunctionDef)}
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
    return own.union(*(methods(classes, base) for base in bases if base != name))


def count_calls(root: Path) -> dict[str, int]:
    settings = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, env=settings, check=True, cwd=root
    )
    counts: dict[str, int] = json.loads(ran.stdout.splitlines()[-1])
    return counts


def measures(root: Path) -> dict[str, int | str]:
    """Return the measures of a checkout by name."""
    texts = {path: path.read_text() for path in files(root)}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: text.count("\n") for path, text in texts.items()}
    documented = {
        path: sum((each.end_lineno or each.lineno) - each.lineno + 1 for each in docstrings(tree))
        for path, tree in trees.items()
    }
    found: dict[str, int | str] = {"lines": sum(lines.values()), "lines of docstrings": sum(documented.values())}
    found["files"] = len(texts)
    packages: Counter[str] = Counter()
    for path, count in lines.items():
        parts = path.relative_to(root).parts
        packages[".".join(parts[:2]) if len(parts) > 2 else parts[0]] += count
    found |= {f"lines of {name}": count for name, count in sorted(packages.items())}
    classes = {node.name: node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    largest = max(classes, key=lambda name: len(methods(classes, name)))
    found["methods of the largest class"] = f"{len(methods(classes, largest))} ({largest})"
    stems = Counter(path.stem for path in texts if path.stem != "__init__")
    found["file names used twice"] = sum(count > 1 for count in stems.values())
    types = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    found["type names used twice"] = sum(count > 1 for count in types.values())
    found["reads of a node's arguments by position"] = sum(len(POSITIONAL.findall(text)) for text in texts.values())
    for name, pattern in PLACEMENTS.items():
        found[f"files that know {name!r}"] = sum(bool(pattern.search(text)) for text in texts.values())
    return found | count_calls(root)


def table(columns: list[dict[str, int | str]]) -> str:
    names = list(dict.fromkeys(name for column in columns for name in column))
    width = max(map(len, names))
    rows = ["  ".join([f"{name:{width}}", *(f"{column.get(name, '-'):>14}" for column in columns)]) for name in names]
    return "\n".join(rows)


if __name__ == "__main__":
    roots = [Path(each).resolve() for each in sys.argv[1:]] or [Path(__file__).parent.parent]
    print(table([measures(root) for root in roots]))
