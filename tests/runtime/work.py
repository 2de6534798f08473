"""What is run both on simulated ranks and on real processes: each function builds something and returns its numbers.

`default_runtime` decides where it runs, so the same call is made in the test's own process and on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

MESHES = {2: Mesh(data=2), 4: Mesh(data=2, tensor=2)}
RULES = {"first/w": P(None, "tensor"), "first/b": P("tensor"), "second": P("tensor")}
OPTIMIZERS = {"sgd": fp.optim.sgd(0.2, momentum=0.9), "adamw": fp.optim.adamw(0.05)}


def plan_of(mesh: Mesh, data: Any) -> Any:
    """The data transform, around tensor parallelism where the mesh has a tensor axis."""
    return fp.chain(fp.tensor_parallel("tensor", RULES), data) if "tensor" in mesh.axis_names else data


DATA = {
    "data_parallel": fp.data_parallel("data"),
    "zero 1": fp.zero(1, "data"),
    "zero 1, flat": fp.zero(1, "data", layout="flat"),
    "zero 3": fp.zero(3, "data"),
}


# -----------------------------------------------------------------------------
# Models
# -----------------------------------------------------------------------------


def parameters() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64) / 2  # noqa: E731
    return {"first": {"w": draw(6, 8), "b": draw(8)}, "second": draw(8, 3), "bias": draw(3)}


def batches(steps: int = 4, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randn(rows, 6, generator=generator, dtype=torch.float64)  # noqa: E731
    return [(draw(), torch.randint(3, (rows,), generator=generator)) for _ in range(steps)]


def loss(params: dict[str, Any], x: Tensor, labels: Tensor) -> Tensor:
    hidden = torch.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return F.cross_entropy(hidden @ params["second"] + params["bias"], labels)


def noisy_loss(params: dict[str, Any], x: Tensor, labels: Tensor) -> Tensor:
    hidden = F.dropout(torch.tanh(x @ params["first"]["w"] + params["first"]["b"]), 0.4)
    return F.cross_entropy(hidden @ params["second"] + params["bias"], labels)


def integer_loss(params: dict[str, Any], x: Tensor, labels: Tensor) -> Tensor:
    """Closed on the integers, so every order of adding gives every bit."""
    hidden = (x @ params["first"]["w"] + params["first"]["b"]).relu()
    return ((hidden @ params["second"]) * labels[:, None]).sum() + params["bias"].sum()


def integer_arguments() -> tuple[Any, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    draw = lambda *shape: torch.randint(-4, 5, shape, generator=generator).double()  # noqa: E731
    params = {"first": {"w": draw(6, 8), "b": draw(8)}, "second": draw(8, 3), "bias": draw(3)}
    return params, draw(8, 6), torch.randint(3, (8,), generator=generator)


# -----------------------------------------------------------------------------
# Work
# -----------------------------------------------------------------------------


def compiled_gradients(mesh: Mesh) -> dict[str, Any]:
    return {
        name: fp.compile(fp.grad_and_value(plan_of(mesh, data)(integer_loss)), mesh)(*integer_arguments())
        for name, data in DATA.items()
        if "zero 1" not in name  # its partial gradients are train_step's to sum
    }


def derivatives_through_shard_map(mesh: Mesh) -> dict[str, Any]:
    """torch.func's own transforms, outside a mapped function: value, grad, grad of grad, jvp, vmap, hessian."""
    axes = mesh.axis_names

    @fp.shard_map(mesh, in_specs=(P("data", axes[1:]), P(axes[1:])), out_specs=P("data"))
    def product(x: Tensor, w: Tensor) -> Tensor:
        partial = x @ w
        return fp.psum(partial, axes[1:]) if axes[1:] else partial

    generator = torch.Generator().manual_seed(3)
    x, w, v = (torch.randint(-4, 5, s, generator=generator).double() for s in [(4, 6), (6, 2), (6, 2)])
    total = lambda w: (product(x, w) ** 3).sum()  # noqa: E731
    gradient = torch.func.grad(total)
    return {
        "value": product(x, w),
        "grad": gradient(w),
        "second": torch.func.grad(lambda w: (gradient(w) * v).sum())(w),
        "jvp": torch.func.jvp(total, (w,), (v,)),
        "vmap": torch.func.vmap(gradient)(torch.stack([w, v])),
        "hessian": torch.func.hessian(total)(w),
    }


def training(mesh: Mesh) -> dict[str, Any]:
    runs = {
        f"{data}, {optimizer}{', noisy and clipped' * noisy}": trained(
            mesh, plan_of(mesh, DATA[data]), OPTIMIZERS[optimizer], noisy_loss if noisy else loss, noisy
        )
        for data, optimizer, noisy in [
            ("data_parallel", "sgd", False),
            ("zero 1", "adamw", False),
            ("zero 1", "sgd", True),
            ("zero 1, flat", "adamw", True),
            ("zero 3", "sgd", False),
            ("zero 3", "adamw", True),
        ]
    }
    return runs


def trained(mesh: Mesh, plan: Any, optimizer: Any, loss: Callable[..., Tensor], noisy: bool) -> dict[str, Any]:
    train = fp.train_step(loss, optimizer, mesh, plan, clip=0.3 if noisy else None, seed=7 if noisy else None)
    state = train.init(parameters())
    losses, norms = [], []
    for batch in batches():
        state, metrics = train(state, *batch)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
    params, optimizer_state = train.whole(state)
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "params": params, "state": optimizer_state}


def everything(mesh: Mesh) -> dict[str, Any]:
    return {
        "gradients": compiled_gradients(mesh),
        "derivatives": derivatives_through_shard_map(mesh),
        "training": training(mesh),
    }
