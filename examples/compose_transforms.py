"""torch.func's transforms through a sharded function: gradients, per-sample gradients, jvp and hessian.

    python examples/compose_transforms.py

One small model, split over `tensor` (its weights) and `data` (its samples). Every derivative is taken of the sharded
function, compiled, run on 4 ranks, and compared with the same derivative of the plain function on one device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import optree
import torch
from einops import einsum

import functional_parallel as fp
from sharding_specs import Mesh, P

MESH = Mesh(data=2, tensor=2)
TENSOR = fp.tensor_parallel("tensor", {"*/w1": P(None, "tensor"), "*/w2": P("tensor", None)})
PLAN = fp.chain(TENSOR, fp.data_parallel("data"))

Params = dict[str, dict[str, torch.Tensor]]


def predict(params: Params, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(einsum(x, params["mlp"]["w1"], "... embed, embed hidden -> ... hidden"))
    return einsum(hidden, params["mlp"]["w2"], "... hidden, hidden embed -> ... embed")


def loss(params: Params, x: torch.Tensor) -> torch.Tensor:
    return (predict(params, x) ** 2).mean()


def directional(f: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative of f along a direction in parameter space, and f."""
    return lambda params, direction, x: fp.jvp(lambda p: f(p, x), (params,), (direction,))


def scaled(f: Callable[..., Any]) -> Callable[..., Any]:
    """f as a function of one scale per parameter: small enough for a whole Hessian."""

    def of_scales(scales: torch.Tensor, params: Params, x: torch.Tensor) -> torch.Tensor:
        mlp = params["mlp"]
        return f({"mlp": {"w1": mlp["w1"] * scales[0], "w2": mlp["w2"] * scales[1]}}, x)

    return of_scales


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    params = {"mlp": {"w1": torch.randn(6, 8).double(), "w2": torch.randn(8, 6).double()}}
    direction = optree.tree_map(torch.randn_like, params)
    x = torch.randn(8, 6).double()
    scales = torch.ones(2).double()
    per_sample = {"in_dims": (None, 0)}

    compare("grad", fp.grad(PLAN(loss)), torch.func.grad(loss), params, x)
    compare(
        "per-sample gradients",
        fp.vmap(fp.grad(TENSOR(loss)), **per_sample, spmd_axis="data"),
        torch.func.vmap(torch.func.grad(loss), **per_sample),
        params,
        x,
    )
    # The direction lies as the parameters do, the samples over data; value and derivative are the same everywhere.
    specs = {"mlp": {"w1": P(None, "tensor"), "w2": P("tensor", None)}}
    compare("jvp", directional(PLAN(loss)), directional(loss), params, direction, x, in_specs=(specs, specs, P("data")))
    # What multiplies the sharded weights is whole, so the Hessian is whole on every rank.
    by_scale = fp.chain(
        fp.tensor_parallel("tensor", P(), batch=(specs, P())), fp.data_parallel("data", batch=(P(), P("data")))
    )
    compare("hessian", fp.hessian(by_scale(scaled(loss))), torch.func.hessian(scaled(loss)), scales, params, x)


def compare(
    name: str, sharded: Callable[..., Any], plain: Callable[..., Any], *args: Any, in_specs: Any = None
) -> None:
    """Run both, print what the sharded one communicates and by how much they differ; refuse more than rounding."""
    out_specs = None if in_specs is None else P()
    step = fp.compile(sharded, MESH, in_specs=in_specs, out_specs=out_specs)
    got, want = optree.tree_leaves(step(*args)), optree.tree_leaves(plain(*args))
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))
    if error > 1e-12:
        raise SystemExit(f"{name}: differs from the plain function by {error:.1e}")
    if fp.is_main_rank():
        sent = ", ".join(
            f"{count} {kind} over {'+'.join(axes)}" for (kind, axes), count in step.program.counts().items()
        )
        print(f"{name:<22} relative error {error:.0e}   {sent or 'nothing sent'}")


if __name__ == "__main__":
    main()
