"""Objects and keywords of torch and of other trainers get an error that shows what to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

import functional_parallel as fp
from functional_parallel.errors import ForeignCollectiveError
from functional_parallel.functions.keywords import ELSEWHERE
from sharding_specs import Mesh, P

MESH, PLAN, SGD = Mesh(data=2), fp.data_parallel("data"), fp.optim.sgd(0.1)


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"]).mean()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def message(f: Callable[[], Any], kind: type[Exception] = TypeError) -> str:
    with pytest.raises(kind) as caught:
        f()
    return str(caught.value)


# -----------------------------------------------------------------------------
# A module where a function of parameters belongs
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda module: fp.train_step(module, SGD, MESH, PLAN),
        lambda module: fp.train_step(module, SGD, MESH),
        PLAN,
        fp.zero(3, "data"),
        fp.accumulate(2),
        fp.remat(),
        fp.mixed_precision("bf16"),
        fp.chain(fp.zero(3, "data"), fp.pipeline("pipe", microbatches=2)),
    ],
    ids=["train_step", "train_step without a plan", "data", "zero", "accumulate", "remat", "precision", "chain"],
)
def test_a_module_is_no_function_of_parameters(use: Callable[[Any], Any]) -> None:
    said = message(lambda: use(net()))
    assert "the module Sequential" in said
    assert "2 parameters, the first at '0.weight'" in said
    assert "model, params = fp.functional(module)" in said and "def loss(params, " in said


def test_a_module_is_compiled_with_its_parameters_as_constants() -> None:
    """It has no parameters of a function, but it is one of its inputs; without specs the error names fp.functional."""
    module = net()
    f = fp.compile(module, MESH, in_specs=P("data"), out_specs=P("data"))
    assert torch.equal(f(torch.ones(4, 2)), module(torch.ones(4, 2)))
    assert "fp.functional(module)" in message(lambda: fp.compile(module, MESH), fp.LayoutError)


def test_a_module_without_parameters_is_a_function() -> None:
    x, y = torch.ones(4, 2), torch.zeros(4, 2)
    assert fp.compile(PLAN(nn.MSELoss()), MESH)(x, y[:, :1].expand(4, 2)) == 1


def test_the_pair_that_functional_returns_is_no_loss() -> None:
    said = message(lambda: fp.train_step(fp.functional(net()), SGD, MESH, PLAN))  # type: ignore[arg-type]
    assert "a pair, as fp.functional returns" in said and "model, params = fp.functional(module)" in said
    assert "not str" in message(lambda: fp.train_step("loss", SGD, MESH, PLAN))  # type: ignore[arg-type]


def test_a_function_is_no_module() -> None:
    assert "fp.functional takes an nn.Module, not the function loss" in message(lambda: fp.functional(loss))  # type: ignore[arg-type]


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize("held", [lambda ddp: ddp, lambda ddp: partial(lambda m, p, x: m(x).mean(), ddp)])
@pytest.mark.parametrize("use", [PLAN, lambda f: fp.train_step(f, SGD, MESH)], ids=["plan", "train_step"])
def test_a_wrapped_module_is_refused_by_plans_and_steps(use: Any, held: Any) -> None:
    said = message(lambda: use(held(DistributedDataParallel(net()))), ForeignCollectiveError)
    assert "DistributedDataParallel" in said and "use fp.data_parallel" in said


# -----------------------------------------------------------------------------
# Optimizers, schedulers, meshes
# -----------------------------------------------------------------------------

OPTIMIZERS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda p: torch.optim.AdamW(p), "fp.optim.adamw(lr=0.001)"),
    (lambda p: torch.optim.AdamW(p, 3e-4, betas=(0.9, 0.95)), "fp.optim.adamw(lr=0.0003, betas=(0.9, 0.95))"),
    (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "fp.optim.sgd(lr=0.1, momentum=0.9)"),
    (lambda p: torch.optim.Adam(p, torch.tensor(0.5)), "fp.optim.adam(lr=0.5)"),
    (lambda p: torch.optim.RMSprop(p), "one of adafactor, adagrad, adam, adamw, lamb, lion, muon, sgd"),
    (lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.5), "fp.optim.adagrad(lr=0.1, lr_decay=0.5)"),
    (lambda p: torch.optim.Muon(p[:1], 0.1, ns_steps=3), "fp.optim.muon(lr=0.1, ns_steps=3)"),
    (lambda p: torch.optim.AdamW, "fp.optim.adamw("),
]


@pytest.mark.parametrize(("make", "fix"), OPTIMIZERS)
def test_an_optimizer_of_torch(make: Callable[[Any], Any], fix: str) -> None:
    optimizer = make(list(net().parameters()))
    said = message(lambda: fp.train_step(loss, optimizer, MESH, PLAN))
    name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    assert f"torch.optim.{name}" in said and fix in said
    written = re.findall(r"fp\.optim\.(\w+)(\(.*?\))[,;.]? ", f"{said} ")
    for function, arguments in written:
        if "…" not in arguments and function != "Optimizer":
            eval(f"fp.optim.{function}{arguments}")  # what it says to write can be written


def test_an_optimizer_that_takes_the_parameters() -> None:
    said = message(lambda: fp.optim.adamw(net().parameters(), lr=0.1))  # type: ignore[misc]
    assert "lr twice, by position (a generator) and as lr=0.1" in said
    assert "holds no parameters: train.init(params) takes them. Write fp.optim.adamw(lr=0.1)" in said
    for parameters in (net().parameters(), list(net().parameters()), net().state_dict()):
        assert "holds no parameters" in message(lambda p=parameters: fp.optim.sgd(p), ValueError)  # type: ignore[misc]


def test_a_scheduler_of_torch() -> None:
    scheduler = CosineAnnealingLR(torch.optim.SGD(net().parameters(), lr=0.1), 10)
    for said in (
        message(lambda: fp.optim.adamw(scheduler), ValueError),  # type: ignore[arg-type]
        message(lambda: fp.train_step(loss, scheduler, MESH, PLAN)),  # type: ignore[arg-type]
    ):
        assert "torch's CosineAnnealingLR" in said and "fp.optim.schedules.cosine(" in said
    other = LambdaLR(torch.optim.SGD(net().parameters(), lr=0.1), lambda step: 1.0)
    assert "a function from the step" in message(lambda: fp.optim.adamw(other), ValueError)  # type: ignore[arg-type]


class DeviceMesh:
    """As torch's: importing it starts nothing, but making one needs a process group."""

    __module__ = "torch.distributed.device_mesh"
    mesh_dim_names, shape = ("data", "tensor"), (2, 4)


class Nameless(DeviceMesh):
    __module__ = "torch.distributed.device_mesh"
    mesh_dim_names = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("mesh", "fix"),
    [
        (DeviceMesh(), "DeviceMesh: write Mesh(data=2, tensor=4)"),
        (Nameless(), "Nameless: write Mesh(axis0=2, axis1=4), with names of your own"),
        ({"data": 2}, "dict: write Mesh(data=2)"),
        ("data=2", "str: write Mesh.parse('data=2')"),
        (4, "int: write Mesh(data=4)"),
        (None, "NoneType: write Mesh() for one rank, or Mesh(data=2)"),
    ],
)
def test_what_is_no_mesh(mesh: Any, fix: str) -> None:
    assert f"train_step takes a sharding_specs.Mesh, not {fix}" in message(lambda: fp.train_step(loss, SGD, mesh))
    assert f"compile takes a sharding_specs.Mesh, not {fix}" in message(lambda: fp.compile(PLAN(loss), mesh))


def test_torchs_own_device_mesh_has_what_is_read_of_it() -> None:
    from torch.distributed.device_mesh import DeviceMesh as TorchsOwn

    assert TorchsOwn.__module__ == DeviceMesh.__module__ and TorchsOwn.__name__ == DeviceMesh.__name__
    assert isinstance(inspect.getattr_static(TorchsOwn, "shape"), property)
    assert hasattr(TorchsOwn, "mesh_dim_names")


# -----------------------------------------------------------------------------
# Keywords
# -----------------------------------------------------------------------------

STEP = partial(fp.train_step, loss, SGD, MESH, PLAN)
KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({"max_grad_norm": 1.0}, "train_step has no argument max_grad_norm: clip gradients by train_step(clip=1.0)"),
    ({"clip_grad_norm": 0.5}, "clip=0.5"),
    ({"gradient_clipping": 1.0}, "clip=1.0"),
    ({"gradient_clip_val": None}, "clip=None"),
    ({"lr": 0.1}, "fp.optim.adamw(0.1)"),
    ({"weight_decay": 0.1}, "fp.optim.adamw(lr, weight_decay=0.1)"),
    ({"zero_stage": 3}, "fp.zero(3, 'data')"),
    ({"sharding_strategy": "FULL_SHARD"}, "fp.zero(3, 'data')"),
    ({"gradient_accumulation_steps": 4}, "fp.accumulate(4)"),
    ({"mixed_precision": "bf16"}, "fp.mixed_precision('bf16')"),
    ({"gradient_checkpointing": True}, "fp.remat()"),
    ({"lr_scheduler": object()}, "fp.optim.schedules"),
    ({"device_mesh": object()}, "mesh="),
    ({"find_unused_parameters": True}, "leave it out"),
    ({"bucket_cap_mb": 25}, "bucket="),
    ({"rematerialise": True}, "its arguments are loss, optimizer, mesh, plan, clip"),
    ({"reductions": "fast"}, "did you mean reduction="),
]


@pytest.mark.parametrize(("options", "said"), KEYWORDS, ids=[next(iter(options)) for options, _ in KEYWORDS])
def test_a_keyword_of_another_trainer(options: dict[str, Any], said: str) -> None:
    told = message(lambda: STEP(**options))
    assert said in told and f"train_step has no argument {next(iter(options))}" in told


@pytest.mark.parametrize(
    ("f", "options", "said"),
    [
        (
            partial(fp.compile, loss, MESH),
            {"in_shardings": P()},
            "compile has no argument in_shardings: write in_specs=",
        ),
        (partial(fp.zero, 3, "data"), {"reshard_after_forward": False}, "zero has no argument reshard_after_forward"),
        (partial(fp.zero, 3, "data"), {"mesh": MESH}, "the mesh goes to fp.train_step or fp.compile"),
        (partial(fp.data_parallel, "data"), {"device_ids": [0]}, "leave it out"),
        (partial(fp.tensor_parallel, "tensor", {}), {"parallelize_plan": {}}, "specs="),
        (partial(fp.pipeline, "pipe"), {"n_microbatches": 4}, "write microbatches=4"),
        (partial(fp.accumulate, 2), {"max_grad_norm": 1.0}, "train_step(clip=1.0)"),
        (partial(fp.mixed_precision, "bf16"), {"loss_scaler": 1}, "did you mean"),
        (partial(fp.optim.adamw, 0.1), {"learning_rate": 0.1}, "adamw has no argument learning_rate: write lr=0.1"),
        (partial(fp.optim.adamw, 0.1), {"fused": True}, "leave it out"),
        (partial(fp.optim.sgd, 0.1), {"max_grad_norm": 1.0}, "train_step(clip=1.0)"),
    ],
)
def test_keywords_of_other_functions(f: Any, options: dict[str, Any], said: str) -> None:
    assert said in message(lambda: f(**options))


def test_hints_name_arguments_that_exist() -> None:
    """Every `train_step(x=…)` and `fp.f(x=…)` in a hint is an argument of that function."""
    for text in ELSEWHERE.values():
        for function, argument in re.findall(r"(?:fp\.)?([\w.]+)\((?:[^()=]*, )?(\w+)=", text):
            if function == "Mesh":
                continue
            target: Any = fp
            for part in function.removeprefix("fp.").split("."):
                target = getattr(target, part)
            assert argument in inspect.signature(target).parameters, text


def test_the_functions_look_as_they_did() -> None:
    assert list(inspect.signature(fp.train_step).parameters)[:4] == ["loss", "optimizer", "mesh", "plan"]
    assert fp.train_step.__name__ == "train_step" and fp.train_step.__module__ == "functional_parallel.training.step"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mesh'"):
        fp.train_step(loss, SGD)  # type: ignore[call-arg]
