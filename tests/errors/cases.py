"""A case of each error and warning of the library: a function that raises it, and is named after it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import functional_parallel as fp
from functional_parallel.schedules import check
from functional_parallel.testing import assert_same, check_rule
from sharding_specs import Mesh, P, validate

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
def SpecWarning() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=15, n_embd=960))
    return fp.rules.for_model(model, mesh=TENSOR)


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
def MemoriesError() -> Any:
    return body(torch.matmul, DATA, (P(memory="host"), P()))(W["w"], X)


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
def RestagingWarning() -> Any:
    def score(params: Any, x: Any) -> Any:
        return params["w"].sum() * x.sum()

    compiled = fp.compile(fp.tensor_parallel("tensor", {"w": P("tensor")})(score), TENSOR)
    return [compiled.lower(W, torch.ones(*shape)) for shape in ((2, 3), (3, 5), (4, 2), (5, 7))]


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
def DiskError() -> Any:
    return fp.offload(state="disk", path="/nvme/run")


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
