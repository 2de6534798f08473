"""A case of each error and warning of the library, and its text as docs/errors.md shows it.

`python -m tests.errors.texts` writes the texts into the page. `tests/errors/test_texts.py` raises every error and
compares. What differs between runs (files, lines, folders, processes, seconds) is replaced.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, use_runtime
from functional_parallel.schedules import check
from functional_parallel.testing import assert_same, check_rule
from sharding_specs import Mesh, P, validate
from tests.layout_of_code import ROOT
from tests.processes import run_on_processes

PAGE = ROOT / "docs" / "errors.md"

DATA, TENSOR, PIPE = Mesh(data=2), Mesh(tensor=2), Mesh(pipe=2)
W, X = {"w": torch.ones(4, 4)}, torch.ones(4, 4)

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register the case of the error that the function is named after."""
    CASES[function.__name__] = function
    return function


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"]).square().mean()


ROWS, WHOLE = (P("tensor"),), P()


def body(f: Callable[..., Any], mesh: Mesh = TENSOR, in_specs: Any = ROWS, out_specs: Any = WHOLE) -> Any:
    return fp.shard_map(f, mesh, in_specs=in_specs, out_specs=out_specs)


def trained(**options: Any) -> Any:
    return fp.train_step(loss, fp.optim.sgd(0.1), DATA, fp.zero(3, "data"), **options)


# --- layouts and collectives ---


@case
def ArgumentSpecError() -> Any:
    plan = fp.zero(3, "data")

    def by_hand(params: Any, x: torch.Tensor) -> torch.Tensor:
        return plan(loss)(params, x)

    return body(by_hand, DATA, (P(), P("data")))(W, X)


@case
def CollectiveShapeError() -> Any:
    return body(lambda x: fp.psum_scatter(x, "tensor"), in_specs=(P(None, "tensor"),), out_specs=P("tensor"))(
        torch.ones(3, 4)
    )


@case
def CollectiveTypeError() -> Any:
    return fp.vmap(lambda x: fp.pscatter(x, "i"), axis_name="i")(torch.ones(2, 4))


@case
def ForeignCollectiveError() -> Any:
    def averaged(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.ops._c10d_functional.all_reduce(loss(params, x), "avg", "default")

    return fp.compile(fp.data_parallel("data")(averaged), DATA)(W, X)


@case
def LayoutError() -> Any:
    return fp.compile(loss, DATA)(W, X)


@case
def NotDifferentiableError() -> Any:
    return body(fp.grad(lambda x: fp.pmax(x.sum(), "tensor")), out_specs=P("tensor"))(X)


@case
def OutSpecError() -> Any:
    def forgotten(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)

    return body(forgotten)(X)


@case
def EqualCopiesWarning() -> Any:
    def copies(x: torch.Tensor) -> torch.Tensor:
        return fp.psum(fp.all_gather(x, "tensor"), "tensor")

    return body(copies)(X)


@case
def TypingError() -> Any:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return fp.psum(fp.psum(x.sum(), "tensor"), "tensor")

    return body(doubled)(X)


@case
def UnboundAxisError() -> Any:
    return fp.psum(X, "data")


# --- specs and meshes ---


@case
def MeshError() -> Any:
    return Mesh(data=3, tensor=2).resolve(8)


@case
def SpecError() -> Any:
    return validate({"w": torch.ones(5, 3)}, {"w": P("tensor")}, TENSOR)


# --- tracing ---


@case
def CustomFunctionError() -> Any:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    plan = fp.data_parallel("data")
    return fp.compile(fp.grad(plan(lambda p, x: Cube.apply(x @ p["w"]).mean())), DATA)(W, X)


@case
def MemoryLayoutError() -> Any:
    def by_strides(params: Any, x: torch.Tensor) -> torch.Tensor:
        return loss(params, x) * x.stride(0)

    step = fp.compile(fp.data_parallel("data")(by_strides), DATA)
    step(W, torch.ones(8, 4))
    return step(W, torch.ones(4, 8).t())


@case
def MutationError() -> Any:
    calls = torch.zeros(())

    def counted(params: Any, x: torch.Tensor) -> torch.Tensor:
        calls.add_(1)
        return loss(params, x)

    return fp.compile(fp.data_parallel("data")(counted), DATA)(W, X)


@case
def RandomKeyError() -> Any:
    def with_dropout(params: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x @ params["w"], 0.5).mean()

    return fp.compile(fp.data_parallel("data")(with_dropout), DATA)(W, X)


@case
def TracingError() -> Any:
    def with_a_branch(params: Any, x: torch.Tensor) -> torch.Tensor:
        value = loss(params, x)
        return value if value > 0 else -value

    return fp.compile(fp.data_parallel("data")(with_a_branch), DATA)(W, X)


# --- plans, rules and pipelines ---


@case
def BudgetError() -> Any:
    plan = fp.chain(fp.remat(budget="64 B"), fp.zero(3, "data"))
    return fp.train_step(loss, fp.optim.sgd(0.1), DATA, plan).lower(W, X)


@case
def OrderError() -> Any:
    return fp.chain(fp.zero(3, "data"), fp.tensor_parallel("tensor", {"*": P()}))


@case
def PartitionError() -> Any:
    return fp.compile(fp.tensor_parallel("tensor", {"w": P("tensor")}, strict=True)(of_medians), TENSOR)(W, X)


def of_medians(params: Any, x: torch.Tensor) -> torch.Tensor:
    return params["w"].kthvalue(2).values.sum() + loss(params, x)


@case
def PartitionWarning() -> Any:
    return fp.compile(fp.tensor_parallel("tensor", {"w": P("tensor")})(of_medians), TENSOR)(W, X)


@case
def PipelineError() -> Any:
    plan = fp.pipeline("pipe", microbatches=2)
    return fp.compile(fp.grad_and_value(plan(lambda p, x: (x @ p["w"]).mean())), Mesh(pipe=8))(W, X)


@case
def RuleError() -> Any:
    return fp.register_rule(torch.ops.aten.relu.default, "b n, b m")


@case
def ScheduleError() -> Any:
    return check(fp.schedules.Schedule.of(["0F0 0F1 0B0"], microbatches=2, name="mine"))


@case
def UnrollError() -> Any:
    plan = fp.accumulate(2, batch=P((2, "microbatch")))
    return fp.compile(fp.grad(plan(loss)), Mesh())(W, X)


# --- running on ranks ---


@case
def BackendError() -> Any:
    def broken(*_: Any) -> Any:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx")

    with patch("functional_parallel._torch.compile_by_inductor", broken):
        return fp.compile(fp.data_parallel("data")(loss), DATA, backend="inductor")(W, X)


@cache
def on_two_processes() -> dict[str, str]:
    """The texts of errors that need processes, by their names."""
    first, second = run_on_processes(_rank, 2)
    assert set(first) == set(second)
    return dict(first)


def _rank(rank: int) -> dict[str, str]:
    use_runtime(ProcessRuntime(DATA, timeout=6))
    found: dict[str, str] = {}

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
        except fp.errors.Error as error:
            found[type(error).__name__] = str(error)

    train = trained(batch="own")
    state = train.init(W)
    state, _ = train(state, X)
    note(lambda: trained().init({"w": W["w"] + rank}))
    note(lambda: fp.compile(fp.data_parallel("data")(lambda p, x: loss(p, x) + (x.sum() if rank else 0.0)), DATA)(W, X))
    note(lambda: train(state, X[: 4 - rank]))
    return found


@case
def CallMismatchError() -> Any:
    raise fp.errors.CallMismatchError(on_two_processes()["CallMismatchError"])


@case
def InputMismatchError() -> Any:
    raise fp.errors.InputMismatchError(on_two_processes()["InputMismatchError"])


@case
def ProgramMismatchError() -> Any:
    raise fp.errors.ProgramMismatchError(on_two_processes()["ProgramMismatchError"])


@case
def CollectiveError() -> Any:
    found = run_on_processes(_that_dies, 2, deaths=True)
    raise fp.errors.CollectiveError(found[0])


def _that_dies(rank: int) -> str:
    use_runtime(ProcessRuntime(DATA, timeout=20))
    train = trained()
    state, _ = train(train.init(W), X)
    train.params(state)
    if rank:
        time.sleep(0.5)  # rank 0 has left the call by then
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    try:
        train(state, X)
    except fp.errors.CollectiveError as error:
        return str(error)
    return ""


@case
def ReentrantCallError() -> Any:
    (found, _) = run_on_processes(_on_two_threads, 2)
    raise fp.errors.ReentrantCallError(found)


def _on_two_threads(rank: int) -> str:
    entered, refused, found = threading.Event(), threading.Event(), list[str]()

    def that_waits(x: torch.Tensor) -> torch.Tensor:
        entered.set()
        refused.wait(20)
        return x.clone()

    op = torch.library.custom_op("texts::waits", that_waits, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.clone)
    fp.register_rule(torch.ops.texts.waits.default, "... -> ...")
    train, plan = trained(), fp.zero(3, "data")
    state, _ = train(train.init(W), X)
    evaluate = train.compile(plan(lambda p, x: loss(p, x)))
    waiting = train.compile(plan(lambda p, x: loss(p, op(x))))
    evaluate(state, X)
    thread = threading.Thread(target=lambda: waiting(state, X), name="evaluation")
    thread.start()
    entered.wait(20)
    try:
        evaluate(state, X)
    except fp.errors.ReentrantCallError as error:
        found.append(str(error))
    refused.set()
    thread.join()
    return found[0]


@case
def LaunchError() -> Any:
    from functional_parallel.runtime import launch_of_environment

    variables = {"RANK": "1", "WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    with patch.dict(os.environ, variables):
        return launch_of_environment()


# --- training ---


@case
def CheckpointError() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return trained().restore(folder)


@case
def DamagedCheckpointError() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        train = trained()
        train.save(train.init(W), folder)
        file = next(Path(folder).rglob("params/*.safetensors"))
        file.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
        return train.restore(folder)


@case
def RemovedCheckpointError() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        train = trained(donate=False)
        state = train.init(W)
        train.save(state, folder)
        opened = fp.checkpoint.inspect(folder)
        fp.checkpoint.Saver(folder, keep=1, asynchronous=False)(train, train(state, X)[0])
        return opened.verify()


@case
def DonatedStateError() -> Any:
    train = trained()
    state = train.init(W)
    train(state, X)
    return train(state, X)


@case
def LossScaleError() -> Any:
    plan = fp.chain(fp.mixed_precision("fp16", loss_scale=fp.LossScale(initial=1.0, hysteresis=1)), fp.zero(1, "data"))
    train = fp.train_step(loss, fp.optim.sgd(0.1), DATA, plan)
    return train(train.init(W), X * 1e6)


@case
def NonFiniteError() -> Any:
    train = trained()
    return train(train.init(W), X * 1e30)


@case
def NotTrainedWarning() -> Any:
    return trained().lower({**W, "v": torch.ones(3)}, X)


@case
def NothingToTrainError() -> Any:
    model = torch.nn.Linear(4, 4)
    train = fp.train_step(lambda p, x: model(x).mean(), fp.optim.sgd(0.1), DATA, fp.zero(3, "data"))
    return train.lower(W, X)


def prepared(model: torch.nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = {"loss": lambda model, x: model(x).mean(), "mesh": DATA, "plan": fp.data_parallel("data")}
    return fp.prepare(model, optimizer, **parts), optimizer


@case
def SideEffectError() -> Any:
    step, optimizer = prepared(torch.nn.Linear(4, 4))
    optimizer.param_groups[0]["weight_decay"] = 0.5
    return step(X)


@case
def SideEffectWarning() -> Any:
    model, kept = torch.nn.Sequential(torch.nn.Linear(4, 4)), []

    def record(module: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        kept.append(out)

    model[0].register_forward_hook(record)
    return prepared(model)[0](X)


@case
def UnevenBatchError() -> Any:
    return fp.pad_batch({"x": torch.ones(5, 2)}, 4)


# --- tests ---


@case
def NotEquivalentError() -> Any:
    mean, total = (lambda x: fp.psum(x.mean(), "tensor")), (lambda x: fp.psum(x.sum(), "tensor"))
    return assert_same(mean, total, TENSOR, (P("tensor"),), (X,))


@case
def FalseRuleError() -> Any:
    from tests.test_check_rule import SAMPLES, ops, register

    register(ops.swiglu, "~..., ~... -> ...")
    return check_rule(ops.swiglu.default, [SAMPLES[ops.swiglu]])


@case
def UncheckedRuleError() -> Any:
    return check_rule(torch.ops.aten.relu.default, [(torch.ones(5),)])


def text_of(name: str) -> str:
    """Raise an error, or warn, and return the text as the page shows it."""
    kind = getattr(fp.errors, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            CASES[name]()
        except kind as error:
            assert type(error) is kind, f"the case raises {type(error).__name__}"
            return _shown(name, str(error))
    found = [each for each in caught if type(each.message) is kind]
    assert found, f"the case of {name} raises nothing"
    return _shown(name, str(found[0].message))


_REPLACED = (
    (r"[\w/]+/(test_)?texts\.py|\btexts\.py", "train.py"),
    (r"(?<=\.py:)\d+", "12"),
    (re.escape(tempfile.gettempdir()) + r"/\w+", "runs/gpt"),
    (r"\d+\.\d+ s\b|\b\d+ s\b", "20 s"),
    (r"\([0-9a-f]{8}\)", "(35ae108a)"),
    (r"(?<=\d\.\d\d)\d{4,}", ""),
    (r"process \d+", "process 4711"),
)


def _shown(name: str, text: str) -> str:
    for pattern, replacement in _REPLACED:
        text = re.sub(pattern, replacement, text)
    lines = f"{name}: {text}".splitlines()
    shown = [part for line in lines for part in textwrap.wrap(line, 118, subsequent_indent=_indent(line))]
    return "\n".join(shown)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def section(name: str) -> str:
    """Return the section of an error on the page."""
    found = re.search(rf"^### `{name}`\n.*?(?=^### |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/errors.md has no section for {name}"
    return found.group()


def write() -> None:
    page = PAGE.read_text()
    for name in CASES:
        old = section(name)
        without = re.sub(r"\n```text\n.*?```\n", "", old, flags=re.DOTALL).rstrip("\n")
        page = page.replace(old, f"{without}\n\n```text\n{text_of(name)}\n```\n\n")
    PAGE.write_text(page.rstrip("\n") + "\n")


if __name__ == "__main__":
    from tests.errors import texts

    texts.write()  # under its own name, so that processes find the functions
