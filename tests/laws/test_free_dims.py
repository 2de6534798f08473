"""Ops of which a batch may be split: computed on each rank's part, strictly, so that nothing is gathered for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import functional_parallel as fp
from sharding_specs import Mesh, P

MESH = Mesh(axis=2)
IMAGES, MATRICES, ROWS = (4, 2, 6, 6), (4, 3, 3), (4, 6)

Op = Callable[[torch.Tensor], torch.Tensor]


def spd(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mT + 3 * torch.eye(x.shape[-1], dtype=x.dtype)


#: the op, and the shape of its operand, whose first dim is split
OPS: dict[str, tuple[Op, tuple[int, ...]]] = {
    **{
        f"interpolate {mode}": (lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode), IMAGES)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    **{
        f"pad {mode}": (lambda x, mode=mode: F.pad(x, (1, 2, 2, 1), mode=mode), IMAGES)
        for mode in ("reflect", "replicate", "circular")
    },
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (4, 8, 3, 3)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), IMAGES),
    "unfold to patches": (lambda x: F.unfold(x, 2), IMAGES),
    "fold": (lambda x: F.fold(x, (3, 3), 2), (4, 8, 4)),
    "grid_sample": (lambda x: F.grid_sample(x, x.movedim(1, -1).tanh(), align_corners=False), IMAGES),
    "adaptive_max_pool": (lambda x: F.adaptive_max_pool2d(x, 2), IMAGES),
    "max_unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), IMAGES),
    "avg_pool3d": (lambda x: F.avg_pool3d(x[:, None], 2), IMAGES),
    "instance_norm": (F.instance_norm, IMAGES),
    "inv": (lambda x: torch.linalg.inv(spd(x)), MATRICES),
    "slogdet": (lambda x: torch.linalg.slogdet(spd(x)).logabsdet, MATRICES),
    "det": (torch.linalg.det, MATRICES),
    "cholesky": (lambda x: torch.linalg.cholesky(spd(x)), MATRICES),
    "solve": (lambda x: torch.linalg.solve(spd(x), x), MATRICES),
    "solve vectors": (lambda x: torch.linalg.solve(spd(x), x[:, 0]), MATRICES),
    "solve_triangular": (lambda x: torch.linalg.solve_triangular(spd(x), x, upper=True), MATRICES),
    "svdvals": (torch.linalg.svdvals, MATRICES),
    "eigvalsh": (lambda x: torch.linalg.eigvalsh(spd(x)), MATRICES),
    "qr": (lambda x: torch.linalg.qr(spd(x)).R, MATRICES),
    "matrix_exp": (torch.matrix_exp, MATRICES),
    "pinv": (lambda x: torch.linalg.pinv(spd(x)), MATRICES),
    "cross": (lambda x: torch.linalg.cross(x, x.flip(1)), MATRICES),
    "cdist": (lambda x: torch.cdist(x, x.flip(1)), MATRICES),
    "every other sample": (lambda x: x[1::2] * x[::2], ROWS),
    "diagonal": (lambda x: x.diagonal(dim1=1, dim2=2), MATRICES),
    "diag_embed": (torch.diag_embed, ROWS),
    "fft": (lambda x: torch.fft.rfft(x).abs(), ROWS),
    "irfft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * (2 + 1j)), ROWS),
    "glu": (F.glu, ROWS),
    "logsigmoid": (F.logsigmoid, ROWS),
    "hardswish": (F.hardswish, ROWS),
    "prelu": (lambda x: F.prelu(x, torch.full((6,), 0.25, dtype=x.dtype)), ROWS),
    "cumprod": (lambda x: x.cumprod(1), ROWS),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), ROWS),
    "cummax": (lambda x: x.cummax(1).values, ROWS),
    "argsort": (lambda x: x.argsort(dim=1, stable=True), ROWS),
    "median": (lambda x: x.median(1).values, ROWS),
    "aminmax": (lambda x: x.aminmax(dim=1).max, ROWS),
    "std_mean": (lambda x: torch.std_mean(x, 1)[0], ROWS),
    "nanmean": (lambda x: torch.where(x > 0, x, torch.nan).nanmean(1), ROWS),
    "windows": (lambda x: x.unfold(1, 3, 2), ROWS),
    "index_add": (lambda x: x.index_add(1, torch.tensor([0, 2]), x[:, :2]), ROWS),
    "index_copy": (lambda x: x.index_copy(1, torch.tensor([0, 2]), x[:, 3:5]), ROWS),
    "scatter_reduce": (lambda x: x.scatter_reduce(1, (x > 0).long(), x, "amax"), ROWS),
    "isin": (lambda x: torch.isin(x.round(), torch.arange(2.0, dtype=x.dtype)), ROWS),
    "bucketize": (lambda x: torch.bucketize(x, torch.arange(3, dtype=x.dtype)), ROWS),
    "triplet_margin_loss": (lambda x: F.triplet_margin_loss(x, x.flip(1), x.roll(1, 1), reduction="none"), ROWS),
    "complex": (lambda x: torch.polar(x, x).real + torch.complex(x, x).abs(), ROWS),
}


def undifferentiable(op: Op, x: torch.Tensor) -> str | None:
    """Why this torch has no derivative of an op, if it has none: that of aminmax came with 2.12."""
    try:
        torch.func.grad(lambda x: op(x).sum())(x)
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", OPS)
def test_a_batch_that_is_split_is_not_gathered(name: str) -> None:
    op, shape = OPS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return op(x).sin().sum()

    spec = P("axis", *[None] * (len(shape) - 1))
    step = fp.compile(fp.partition(op, "axis", (spec,), strict=True, parameters=None), MESH)
    torch.testing.assert_close(step(x), op(x), rtol=1e-10, atol=1e-10)
    assert step.program.counts() == {}
    if not op(x).is_floating_point():
        return
    step = fp.compile(fp.grad_and_value(fp.partition(loss, "axis", (spec,), strict=True, parameters=None)), MESH)
    missing = undifferentiable(op, x)
    if missing is not None:
        assert missing == "derivative for aten::aminmax is not implemented"
        with pytest.raises(RuntimeError, match=missing):
            step(x)
        return
    torch.testing.assert_close(step(x), torch.func.grad_and_value(loss)(x), rtol=1e-10, atol=1e-10)
    assert step.program.counts() == {("psum", ("axis",)): 1}
