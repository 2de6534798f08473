"""A two-layer network, its parameters annotated where they are created, trained over data and tensor parallel ranks.

Run with `python examples/annotate_mlp.py` (4 simulated ranks) or under `torchrun --nproc-per-node 4`.
"""

from argparse import ArgumentParser

import torch
from einops import einsum

import functional_parallel as fp
from sharding_specs import Mesh, annotate, split


def init(embed: int, hidden: int) -> dict[str, torch.Tensor]:
    return {
        "w1": annotate(torch.randn(embed, hidden) / embed**0.5, "embed hidden/tensor"),
        "w2": annotate(torch.randn(hidden, embed) / hidden**0.5, "hidden/tensor embed"),
    }


def loss(params: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    hidden = torch.relu(einsum(x, params["w1"], "batch embed, embed hidden -> batch hidden"))
    return ((einsum(hidden, params["w2"], "batch hidden, hidden embed -> batch embed") - y) ** 2).mean()


ArgumentParser(description=__doc__).parse_args()
torch.manual_seed(0)
mesh = Mesh(data=2, tensor=2)
params, specs = split(init(embed=8, hidden=32))
batch = (torch.randn(16, 8), torch.randn(16, 8))
plan = fp.chain(fp.tensor_parallel("tensor", specs), fp.zero(3, "data"))
step = fp.compile(fp.grad_and_value(plan(loss)), mesh)
grads, value = step(params, batch)
expected = torch.func.grad(loss)(params, batch)
if fp.is_main_rank():
    print(step.explain())
    print(f"loss {value:.6f}; gradients differ by {max((grads[k] - expected[k]).abs().max() for k in grads):.1e}")
