"""Numbers on a GPU against those on the CPU: plans, half precision, torch's attention kernels, and random bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import optree
import report
import torch
import torch.nn.functional as F
from gpu_contestants import made
from gpu_workloads import TOYS, Workload
from model import ADAMW
from torch.nn.attention import SDPBackend, sdpa_kernel

import functional_parallel as fp
from sharding_specs import Mesh

HEAD = ("what", "case", "largest difference", "finite")
Row = tuple[str, str, str, str]

PLANS: dict[str, tuple[Any, Mesh]] = {
    "one rank": (None, Mesh()),
    "zero 0": (fp.zero(0, "data"), Mesh(data=2)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "zero 2, flat": (fp.zero(2, "data", layout="flat"), Mesh(data=2)),
    "remat, microbatches": (fp.chain(fp.remat(), fp.zero(1, "data"), fp.accumulate(2)), Mesh(data=1)),
}
KERNELS = {
    "chosen by torch": None,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
LAYOUTS = {"b h t d": (0, 1, 2, 3), "b t h d": (0, 2, 1, 3), "t b h d": (2, 0, 1, 3)}


def equal_table(device: str, short: bool) -> str:
    return report.table(
        HEAD, [*plans(device, short), *precisions(device, short), *attention(device, short), *draws(device)]
    )


def plans(device: str, short: bool) -> Iterator[Row]:
    """Three steps in float64 under each plan; losses and parameters."""
    workload, backends = TOYS["gpt"], ["eager"]
    if device == "cuda":
        backends += ["cudagraphs"]
    for name, (plan, mesh) in list(PLANS.items())[: 2 if short else None]:
        want = trained(workload, "cpu", plan, mesh, torch.float64)
        for backend in backends:
            found = trained(workload, device, plan, mesh, torch.float64, backend=backend)
            yield ("steps in float64", f"{name}, {backend}", *_compared(found, want))


def precisions(device: str, short: bool) -> Iterator[Row]:
    """Three steps in half precision; losses. A loss scale may skip the first steps."""
    want = trained(TOYS["gpt"], "cpu", None, Mesh(), torch.float32)[-1:]
    for precision in ("bf16", "fp16"):
        scale = {"loss_scale": fp.LossScale(initial=1024.0)} if precision == "fp16" else {}
        plan = fp.mixed_precision(precision, **scale)
        found = trained(TOYS["gpt"], device, plan, Mesh(), torch.float32)
        yield ("steps in half precision, loss", precision, *_compared(found[-1:], want))
        if short:
            return


def trained(
    workload: Workload, device: str, plan: Any, mesh: Mesh, dtype: torch.dtype, **options: Any
) -> list[torch.Tensor]:
    """Return the parameters after three steps, and the last loss."""
    model, params = fp.functional(made(workload, "cpu"))
    params = optree.tree_map(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), params)

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return workload.loss(lambda x: model(params, x), batch)

    train = fp.train_step(loss, fp.optim.adamw(**ADAMW), mesh, plan, clip=1.0, **options)
    state, batch = train.init(params), workload.batch(0).to(device)
    for _ in range(3):
        state, metrics = train(state, batch)
    return [x.cpu() for x in optree.tree_leaves((train.params(state), metrics.loss))]


def attention(device: str, short: bool) -> Iterator[Row]:
    """Results and gradients of each kernel, against float64 on the CPU: what torch chooses, and what is not finite."""
    for dtype in (torch.bfloat16, torch.float16):
        for time, head in ((16, 8),) if short else ((16, 8), (16, 64), (128, 8), (128, 64), (256, 128)):
            for layout, order in LAYOUTS.items():
                for name, kernel in KERNELS.items():
                    case = f"{str(dtype)[6:]}, time {time}, head {head}, {layout}, {name}"
                    try:
                        found, want = _attended(dtype, device, kernel, time, head, order)
                    except RuntimeError:  # a kernel that refuses the shape
                        continue
                    difference, finite = _compared(found, want)
                    if kernel is None or finite != "yes":
                        yield "attention", case, difference, finite
            if short:
                return


def _attended(
    dtype: torch.dtype, device: str, kernel: SDPBackend | None, time: int, head: int, order: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = [torch.randn(8, 4, time, head, generator=generator, dtype=torch.float64, device="cpu") for _ in range(4)]
    back = [order.index(dim) for dim in range(4)]

    def run(dtype: torch.dtype, device: str, attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        *xs, up = (x.to(device, dtype).permute(*order).contiguous().permute(*back) for x in drawn)
        xs = [x.requires_grad_() for x in xs]
        out = attend(*xs)
        return [x.detach().double().cpu() for x in (out, *torch.autograd.grad(out, xs, up))]

    plain = partial(F.scaled_dot_product_attention, is_causal=True)

    def chosen(*xs: torch.Tensor) -> torch.Tensor:
        if kernel is None:
            return plain(*xs)
        with sdpa_kernel(kernel):
            return plain(*xs)

    return run(dtype, device, chosen), run(torch.float64, "cpu", plain)


def draws(device: str) -> Iterator[Row]:
    """The bits of keyed draws, in each dtype."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = torch.empty(1000, dtype=dtype, device="cpu")
        found, want = (fp.random.uniform(fp.random.key(7).to(d), x.to(d)).cpu() for d in (device, "cpu"))
        yield ("keyed draws", str(dtype)[6:], *_compared([found.double()], [want.double()]))
    ones = torch.ones(1000, device="cpu")
    kept, wanted = (fp.random.dropout(ones.to(d), 0.3, key=fp.random.key(7).to(d)).cpu() for d in (device, "cpu"))
    yield ("keyed draws", "dropout", *_compared([kept], [wanted]))


def _compared(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> tuple[str, str]:
    """Return the largest difference relative to the largest element of a tensor, and whether all are finite."""
    if not all(bool(x.isfinite().all()) for x in found):
        return "", "NO"
    pairs = zip(found, want, strict=True)
    worst = max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in pairs if x.is_floating_point())
    return f"{worst:.1e}", "yes"
