"""The arguments of a collective have names, and only `collectives.call` knows their positions."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

import functional_parallel as fp
from functional_parallel.collectives import COMMUNICATING, STARTED, call_of, primitive_of
from functional_parallel.runtime.processes.process_communicator import ProcessCommunicator
from sharding_specs import Mesh, P

LIBRARY = Path(fp.__file__).parent
KNOWS = {"collectives/call.py"}
WALKS = {
    "ir/graph.py",
    "ir/simplify.py",
    "ir/stamping.py",
    "ir/text.py",
    "runtime/execution/codegen.py",
}  # they treat all ops alike
VALUES = {"dim": 1, "split_dim": 1, "concat_dim": 2, "pairs": [0, 1], "source": 1, "owner": 1}


@given(st.sampled_from(sorted({*COMMUNICATING, "pscatter", "pcast", "axis_index"})))
def test_a_call_has_the_arguments_of_its_op(kind: str) -> None:
    op = getattr(torch.ops.fp, kind).default
    given = {"x": "x", "axes": ["i", "j"], "src": "varying", "dst": "reduced", **VALUES}
    args = tuple(given[each.name] for each in op._schema.arguments if not each.kwarg_only)
    call = call_of(kind, args)
    assert (call.target, call.args, call.kwargs, call.axes) == (op, args, {}, ("i", "j"))
    moved = call.with_dims(lambda dim: dim + 1)
    assert moved.dims == tuple(dim + 1 for dim in call.dims) and call_of(kind, moved.args) == moved


def test_a_process_can_start_what_is_started() -> None:
    assert all(callable(getattr(ProcessCommunicator, f"_start_{kind}")) for kind in STARTED)
    with pytest.raises(AttributeError):
        _ = ProcessCommunicator._start_pmax  # type: ignore[attr-defined]


def positional_reads(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that read arguments of a collective by position, or select them by being texts."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.comprehension):
            texts = [each for each in scope.ifs if "isinstance" in ast.unparse(each) and "str)" in ast.unparse(each)]
            if texts and any(word in ast.unparse(scope.iter) for word in ("args", "params")):
                yield texts[0].lineno
        if isinstance(scope, (ast.FunctionDef, ast.Lambda)):
            inside = list(ast.walk(scope))
            asked = {each.args[0].id for each in inside if _asks(each)}  # type: ignore[attr-defined]
            for each in inside if asked else ():
                unpacks = isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Tuple)
                read = each.value if unpacks or isinstance(each, ast.Subscript) else None  # type: ignore[attr-defined]
                of = read.value if isinstance(read, ast.Attribute) and read.attr == "args" else None
                if isinstance(of, ast.Name) and of.id in asked:
                    yield each.lineno


def _asks(node: ast.AST) -> bool:
    """Whether a call asks whether a variable is a collective."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
        return False
    return node.func.id in ("primitive_name", "collective_call") and isinstance(node.args[0], ast.Name)


def test_the_rule_finds_the_reads_of_a_sample() -> None:
    sample = (
        "def f(node):\n    if primitive_name(node) == 'psum':\n        return node.args[1]\n"
        "def g(node):\n    name = primitive_name(node)\n    x, axes, *params = node.args\n"
        "def h(node):\n    return [arg for arg in node.args[2:] if isinstance(arg, str)]\n"
        "def allowed(node):\n    return node.args[1]\n"
    )
    assert sorted(positional_reads(ast.parse(sample))) == [3, 6, 8]


OF_OTHER_OPS = {  # reads in functions that ask whether an op is a collective, and then read another op
    "checker/typing.py": 4,
    "passes/compressed.py": 3,
    "passes/reduce_types.py": 1,
    "passes/stacked_layers.py": 1,
    "passes/transposed.py": 1,
    "passes/running_sums.py": 2,
    "program/aliasing.py": 1,
    "program/memory_moves.py": 1,
    "runtime/execution/regions.py": 2,
    "runtime/processes/rank_program.py": 2,
}


def test_no_file_reads_arguments_of_a_collective_by_position() -> None:
    texts = {str(path.relative_to(LIBRARY)): path.read_text() for path in sorted(LIBRARY.rglob("*.py"))}
    about = ("primitive_name(", "collective_call(", ", str)")  # only these can have such a read
    found = {name: positional_reads(ast.parse(text)) for name, text in texts.items() if any(map(text.count, about))}
    lines = {name: sorted(set(reads)) for name, reads in found.items() if name not in KNOWS}
    more = {name: reads for name, reads in lines.items() if len(reads) > OF_OTHER_OPS.get(name, 0)}
    assert not more, "use collective_call(node), or first_operand(node) for ops of one operand"


class _Watched(tuple[Any, ...]):
    """Arguments of a collective that note which line of the library reads one by its position."""

    reads: ClassVar[set[str]] = set()

    def _note(self) -> None:
        frame = sys._getframe(2)
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(LIBRARY) and str(path.relative_to(LIBRARY)) not in KNOWS | WALKS:
            self.reads.add(f"{path.relative_to(LIBRARY)}:{frame.f_lineno}")

    def __getitem__(self, index: Any) -> Any:
        self._note()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Any]:
        self._note()
        return super().__iter__()


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params:
        x = torch.relu(x @ layer["w"]) @ layer["v"]
    return x.square().mean()


PARAMS = [{"w": torch.eye(6), "v": torch.eye(6)} for _ in range(2)]
TENSOR = fp.tensor_parallel("tensor", {"*w": P(None, "tensor"), "*v": P("tensor")})
PLANS = {
    "everything": ([fp.mixed_precision("bf16"), fp.remat("layers"), TENSOR, fp.zero(3, "data")], fp.accumulate(2)),
    "zero 1": ([TENSOR, fp.zero(1, "data")], fp.accumulate(2, reduce="each")),
    "pipeline": ([fp.zero(2, "data")], fp.pipeline("pipe", microbatches=2)),
}


@pytest.mark.parametrize("name", PLANS)
def test_no_pass_and_no_runtime_reads_by_position(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same at run time, for nodes that a static rule does not see: with another order of arguments all works."""
    plain = fx.Node.args
    assert isinstance(plain, property) and plain.fget is not None

    def args(node: fx.Node) -> Any:
        held = plain.fget(node)
        return _Watched(held) if primitive_of(node.target) is not None else held

    monkeypatch.setattr(fx.Node, "args", property(args, plain.fset))
    _Watched.reads.clear()
    inner, outer = PLANS[name]
    mesh = Mesh(data=2, **({"pipe": 2} if name == "pipeline" else {"tensor": 2}))
    train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, fp.chain(*inner, outer), clip=1.0, bucket="auto")
    train(train.init(PARAMS), torch.ones(8, 6))
    train.program.memory(), str(train.explain())
    assert not _Watched.reads
