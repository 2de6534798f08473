"""A plain step has the kernels of torch's own backward: no backward that torch fuses is decomposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_parallel as fp
from functional_parallel import _torch
from sharding_specs import Mesh, P

from ..private_torch.count import Count

IMAGES, ROWS, VOLUMES = (2, 4, 6, 6), (4, 8), (2, 4, 4, 4, 4)
TARGETS = torch.rand(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([1, 2, 3, 0])

ACTIVATIONS = """ReLU ReLU6 ELU CELU SELU GELU SiLU Mish Hardswish Hardsigmoid Hardtanh LeakyReLU LogSigmoid Sigmoid
Tanh Softplus Softshrink Hardshrink PReLU"""

CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    **{name: (getattr(nn, name)(), ROWS) for name in ACTIVATIONS.split()},
    "GLU": (nn.GLU(), ROWS),
    "Softmax": (nn.Softmax(-1), ROWS),
    "LogSoftmax": (nn.LogSoftmax(-1), ROWS),
    "logit": (lambda x: torch.logit(x.sigmoid()), ROWS),
    "GroupNorm": (nn.GroupNorm(2, 4), IMAGES),
    "BatchNorm2d": (nn.BatchNorm2d(4, track_running_stats=False), IMAGES),
    "BatchNorm2d, evaluated": (nn.BatchNorm2d(4).eval(), IMAGES),
    "InstanceNorm2d": (nn.InstanceNorm2d(4, affine=True), IMAGES),
    "LayerNorm": (nn.LayerNorm(8), ROWS),
    "Conv2d": (nn.Conv2d(4, 4, 3, padding=1), IMAGES),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 4, 3), IMAGES),
    "MaxPool2d": (nn.MaxPool2d(2), IMAGES),
    "MaxPool3d": (nn.MaxPool3d(2), VOLUMES),
    "AvgPool2d": (nn.AvgPool2d(2), IMAGES),
    "AdaptiveAvgPool2d": (nn.AdaptiveAvgPool2d(2), IMAGES),
    "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d(2), IMAGES),
    "ReflectionPad2d": (nn.ReflectionPad2d(1), IMAGES),
    "ReplicationPad2d": (nn.ReplicationPad2d(1), IMAGES),
    **{f"Upsample, {mode}": (nn.Upsample(scale_factor=2, mode=mode), IMAGES) for mode in ("nearest", "bilinear")},
    "grid_sample": (lambda x: F.grid_sample(x, torch.zeros(2, 2, 2, 2, dtype=x.dtype), align_corners=False), IMAGES),
    "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), ROWS),
    "LSTM": (nn.LSTM(8, 4, batch_first=True), (2, 3, 8)),
    "embedding": (lambda x: F.embedding(CLASSES, x), ROWS),
    "cross_entropy": (lambda x: F.cross_entropy(x, CLASSES), ROWS),
    "mse_loss": (lambda x: F.mse_loss(x, TARGETS), ROWS),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, TARGETS), ROWS),
    "huber_loss": (lambda x: F.huber_loss(x, TARGETS), ROWS),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x.sigmoid(), TARGETS), ROWS),
    "soft_margin_loss": (lambda x: F.soft_margin_loss(x, TARGETS), ROWS),
    "cdist": (lambda x: torch.cdist(x, TARGETS), ROWS),
}

VIEWS = """view detach alias t transpose permute expand unsqueeze squeeze getitem slice select reshape split unbind
as_strided _unsafe_view empty empty_like lift_fresh new_empty_strided ones_like full zeros zeros_like pcast"""
SIMPLE = "mul add sub div neg sum clone copy repeat cat stack _to_copy"  # these are counted together
SAME = {"bmm": "mm", "addmm": "mm", "baddbmm": "mm"}


class Net(nn.Module):
    """The layer of a case between products, which the gradient passes on both sides."""

    def __init__(self, layer: Callable[..., Any], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(shape)), layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x * self.scale)
        y = y[0] if isinstance(y, tuple) else y
        return (y * y).sum()


def case(name: str) -> tuple[Net, Tensor]:
    layer, shape = CASES[name]
    generator = torch.Generator().manual_seed(0)
    return Net(layer, shape).double(), torch.randn(shape, dtype=torch.float64, generator=generator)


def kernels(ops: Iterable[Any]) -> Counter[str]:
    """Count kernels by name. An op in place is the op."""
    names = (str(op).removeprefix("aten.").removeprefix("<built-in function ").partition(".")[0] for op in ops)
    names = (name.rstrip(">").rstrip("_") for name in names)
    return Counter(SAME.get(name, name) for name in names if name not in VIEWS.split())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_a_step_has_the_kernels_of_torch(name: str) -> None:
    net, x = case(name)
    with Count() as mode:
        net(x).backward()
    fn, params = fp.functional(net)
    step = fp.compile(fp.grad(fn), Mesh(), in_specs=(P(), P()), out_specs=P())
    program = step.lower(params, x)
    ours, theirs = kernels(node.target for node in program.traced.nodes), kernels(mode.seen)
    assert sum(map(ours.__getitem__, SIMPLE.split())) <= sum(map(theirs.__getitem__, SIMPLE.split()))
    for simple in SIMPLE.split():
        ours.pop(simple, None)
        theirs.pop(simple, None)
    assert ours == theirs
    found = step(params, x)
    for path, parameter in net.named_parameters():
        torch.testing.assert_close(found[path], parameter.grad, rtol=1e-9, atol=1e-12)


# Backward ops without a derivative, which a program that is differentiated again replaces by their formulas
ONCE = ["SiLU", "Mish", "logit", "GroupNorm", "weight_norm", "LSTM", "BatchNorm2d", "InstanceNorm2d", "LayerNorm"]


@pytest.mark.parametrize("name", ONCE)
def test_second_derivatives(name: str) -> None:
    """Of a program of first derivatives, and of nested gradients in one program."""
    net, x = case(name)
    fn, params = fp.functional(net)
    params = {path: value.detach() for path, value in params.items()}

    def inner(x: Tensor) -> Tensor:
        return fn(params, x).sin()

    wanted = torch.func.jacrev(torch.func.grad(inner))(x)
    step = fp.compile(fp.grad(inner), Mesh(), in_specs=(P(),), out_specs=P())
    torch.testing.assert_close(torch.func.jacrev(step)(x), wanted, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(torch.autograd.functional.jacobian(step, x), wanted, rtol=1e-8, atol=1e-10)
    if name not in ("weight_norm", "LSTM"):  # of which torch has no forward derivative
        torch.testing.assert_close(torch.func.jacfwd(step)(x), wanted, rtol=1e-8, atol=1e-10)

    def penalty(x: Tensor) -> Tensor:
        return (fp.grad(inner)(x) ** 2).sum()

    both = fp.compile(fp.grad(penalty), Mesh(), in_specs=(P(),), out_specs=P())
    torch.testing.assert_close(both(x), torch.func.grad(penalty)(x), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["GroupNorm", "BatchNorm2d", "InstanceNorm2d", "SiLU"])
@pytest.mark.parametrize("plan", ["data", "tensor"])
def test_on_meshes(name: str, plan: str) -> None:
    """The batch, or the channels, over two ranks. A batch norm has the statistics of the global batch."""
    net, x = case(name)
    x = torch.cat([x, -x]) if name == "SiLU" else x
    fn, params = fp.functional(net)
    params = {path: value.detach()[:1] if path == "scale" else value.detach() for path, value in params.items()}
    split = P("data") if plan == "data" else P(None, "data")
    transform = fp.partition if plan == "tensor" else fp.data_parallel
    if plan == "data":
        fp.testing.assert_equivalent(fn, transform("data"), Mesh(data=2), params, x)
        return
    partitioned = fp.partition(fn, "data", (P(), split), P())
    step = fp.compile(fp.grad_and_value(partitioned), Mesh(data=2))
    wanted = torch.func.grad_and_value(fn)(params, x)
    torch.testing.assert_close(step(params, x), wanted, rtol=1e-9, atol=1e-10)


def test_a_gradient_of_a_plain_loss_stays_differentiable() -> None:
    """Outside of a trace nothing tells whether the gradient will be differentiated."""
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    once = fp.grad(lambda x: F.silu(x).sum())(x)
    (twice,) = torch.autograd.grad(once.sum(), x)
    torch.testing.assert_close(twice, torch.func.hessian(lambda x: F.silu(x).sum())(x.detach()).diag())
    assert not _torch.needs_higher_derivatives()
