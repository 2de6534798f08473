"""The practices of distributed training are rows of the table of transposes: each against one device's gradient.

The model is relu(x w₁) w₂ with a squared loss, in integers, so that equal means equal. Rows of x are the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functional_parallel import collectives as fp

from .cases import integers

N = 2
X, W1, W2 = integers(4, 6, seed=0), integers(6, 8, seed=1), integers(8, 2, seed=2)


def model(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return torch.relu(x @ w1) @ w2


def loss(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return (model(x, w1, w2) ** 2).sum()


TRUTH = torch.func.grad(loss, argnums=(1, 2))(X, W1, W2)


def shards(x: Tensor, dim: int) -> Tensor:
    return torch.stack(x.chunk(N, dim))


def over_data(
    step: Callable[..., tuple[Tensor, Tensor]], in_dims: int | None, out_dims: int | None
) -> Callable[..., tuple[Tensor, Tensor]]:
    return fp.vmap(step, in_dims=(0, in_dims, in_dims), out_dims=out_dims, axis_name="data")


def test_data_parallelism() -> None:
    def local(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return fp.psum(loss(x, *fp.pvary((w1, w2), "data")), "data")

    gradients = over_data(torch.func.grad(local, argnums=(1, 2)), None, None)(shards(X, 0), W1, W2)
    assert all(map(torch.equal, gradients, TRUTH))


def test_accumulation_without_synchronising() -> None:
    """Gradients of Reduced parameters stay partial sums: two backwards, one psum."""

    def local(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return loss(x, *fp.pcast((w1, w2), "data", to="varying", src="reduced"))

    def step(x: Tensor, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
        reduced = fp.pcast((w1, w2), "data", to="reduced")
        gradients = [torch.func.grad(local, argnums=(1, 2))(part, *reduced) for part in x.chunk(2)]
        return tuple(fp.psum(first + second, "data") for first, second in zip(*gradients, strict=True))  # type: ignore

    assert all(map(torch.equal, over_data(step, None, None)(shards(X, 0), W1, W2), TRUTH))


@pytest.mark.parametrize("to", ["varying", "reduced"])
def test_sharded_parameters(to: str) -> None:
    """ZeRO-3: gathered before use, so that each rank gets its shard of the summed gradient."""

    def local(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        whole = fp.all_gather((w1, w2), "data", to=to)
        if to == "reduced":
            whole = fp.pcast(whole, "data", to="varying", src="reduced")
        return fp.psum(loss(x, *whole), "data")

    step = over_data(torch.func.grad(local, argnums=(1, 2)), 0, 0)
    gradients = step(shards(X, 0), shards(W1, 0), shards(W2, 0))
    assert all(torch.equal(ours.flatten(0, 1), truth) for ours, truth in zip(gradients, TRUTH, strict=True))


def test_tensor_parallelism() -> None:
    """Megatron's f is pvary and its g is psum: w₁ by columns, w₂ by rows."""

    def local(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return (fp.psum(model(fp.pvary(x, "tensor"), w1, w2), "tensor") ** 2).sum()

    step = fp.vmap(torch.func.grad(local, (0, 1, 2)), (None, 0, 0), (None, 1, 0), axis_name="tensor")
    of_x, of_w1, of_w2 = step(X, shards(W1, 1), shards(W2, 0))
    assert torch.equal(of_x, torch.func.grad(loss)(X, W1, W2))
    assert torch.equal(of_w1.movedim(1, 0), shards(TRUTH[0], 1)) and torch.equal(of_w2, shards(TRUTH[1], 0))


def test_sequence_parallelism() -> None:
    """Between the blocks the rows are sharded: all_gather before them, psum_scatter after."""

    def local(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        rows = fp.psum_scatter(model(fp.all_gather(x, "tensor"), w1, w2), "tensor")
        return fp.psum((rows**2).sum(), "tensor")

    step = fp.vmap(torch.func.grad(local, (0, 1, 2)), axis_name="tensor")
    of_x, of_w1, of_w2 = step(shards(X, 0), shards(W1, 1), shards(W2, 0))
    assert torch.equal(of_x.flatten(0, 1), torch.func.grad(loss)(X, W1, W2))
    assert torch.equal(of_w1, shards(TRUTH[0], 1)) and torch.equal(of_w2, shards(TRUTH[1], 0))


def test_a_pipeline_of_two_stages() -> None:
    """Rank 0 has the first layer and sends its result on; the last layer's gradient comes back by the transpose."""

    def local(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        hidden = fp.ppermute(torch.relu(x @ w1), "pipe", [(0, 1)])
        of_stage = torch.where(fp.axis_index("pipe") == 1, ((hidden @ w2) ** 2).sum(), 0.0)
        return fp.psum(of_stage, "pipe")

    own = lambda w, rank: torch.stack([w if rank == stage else torch.zeros_like(w) for stage in range(N)])  # noqa: E731
    step = fp.vmap(torch.func.grad(local, argnums=(1, 2)), in_dims=(None, 0, 0), axis_name="pipe")
    of_w1, of_w2 = step(X, own(W1, 0), own(W2, 1))
    assert torch.equal(of_w1[0], TRUTH[0]) and torch.equal(of_w2[1], TRUTH[1])


def test_attention_over_sequences_shards_its_heads() -> None:
    """Ulysses: sequence shards become head shards and back, by all_to_all and its transpose."""
    q, k, v = (integers(4, 2, 3, seed=seed) for seed in (3, 4, 5))  # (sequence, heads, dim)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("shd,thd->hst", q, k)
        return torch.einsum("hst,thd->shd", scores * scores, v)

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_head = fp.all_to_all((q, k, v), "i", split_dim=1, concat_dim=0)
        return fp.psum((fp.all_to_all(attention(*by_head), "i", split_dim=0, concat_dim=1) ** 2).sum(), "i")

    truth = torch.func.grad(lambda *qkv: (attention(*qkv) ** 2).sum(), (0, 1, 2))(q, k, v)
    ours = fp.vmap(torch.func.grad(local, (0, 1, 2)), axis_name="i")(*(shards(x, 0) for x in (q, k, v)))
    assert all(torch.equal(x.flatten(0, 1), y) for x, y in zip(ours, truth, strict=True))
