"""torch's losses of each element by itself: split over samples or over features, by no collective but a psum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)

LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": lambda x, y, **o: F.smooth_l1_loss(x, y, beta=0.3, **o),
    "huber": lambda x, y, **o: F.huber_loss(x, y, delta=0.3, **o),
    "soft margin": lambda x, y, **o: F.soft_margin_loss(x, y.sign(), **o),
    "binary cross entropy": lambda x, y, **o: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **o),
    "binary cross entropy, weighted": lambda x, y, **o: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), WEIGHT, **o),
    "with logits": lambda x, y, **o: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **o),
    "with logits, weighted": lambda x, y, **o: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), WEIGHT[:, None].T, pos_weight=WEIGHT, **o
    ),
}


@settings(max_examples=30)
@given(
    name=st.sampled_from(sorted(LOSSES)),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ranks=st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 4)]),
    microbatches=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_values_and_gradients(name: str, reduction: str, ranks: tuple[int, int], microbatches: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    w, x, y = (torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (4, 8, 8))

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        found = LOSSES[name](x @ w, y, reduction=reduction)
        return found.square().sum() if found.ndim else found

    mesh = Mesh(data=ranks[0], tensor=ranks[1])
    split = fp.tensor_parallel("tensor", P(None, "tensor"))
    plan = fp.chain(split, fp.zero(0, "data"), fp.accumulate(microbatches))
    step = fp.testing.assert_equivalent(loss, plan, mesh, w, x, y, rtol=1e-12)
    assert {kind for kind, _ in step.program.counts()} <= {"psum"}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_operands_of_several_shapes(reduction: str) -> None:
    """A target that is the same for all samples, or for all features."""
    w, x = (torch.randn(rows, 4, dtype=torch.float64) for rows in (4, 6))
    targets: list[Any] = [torch.randn(4).double(), torch.randn(1, 4).double(), torch.randn(6, 1).double()]
    for y in targets:
        loss = lambda w, x, y: F.mse_loss(x @ w, y, reduction=reduction)  # noqa: E731
        batch = (P("data"), P("data") if len(y) == 6 else P())
        plan = fp.data_parallel("data", batch=batch)
        fp.testing.assert_equivalent(loss, plan, Mesh(data=2), w, x, y, rtol=1e-12)
