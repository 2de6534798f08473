"""Our optimizers are torch's, as pure functions: the same numbers over many steps, and nothing changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import functional_parallel as fp
from functional_parallel import _torch
from functional_parallel.ir.trained import as_real
from functional_parallel.ops import adamw_kernel
from functional_parallel.ops.adamw_kernel import ADAMW, ADAMW_IN_PLACE, adamw_formula
from tests.private_torch.count import Count

STEPS = 10


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 2302.06675, which torch lacks, line by line and in place."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p, grad, m = map(as_real, (p, p.grad, m))
                c = beta1 * m + (1 - beta1) * grad
                p.sub_(group["lr"] * (c.sign() + group["decay"] * p))
                m.mul_(beta2).add_((1 - beta2) * grad)


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of arXiv 1904.00962, which torch lacks, with bounds of the ratio."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p] or {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["t"] += 1
                state["m"] = beta1 * state["m"] + (1 - beta1) * p.grad
                state["v"] = beta2 * state["v"] + (1 - beta2) * p.grad**2
                self.state[p] = state
                power = state["t"] if group.get("correct", True) else 1e9
                m, v = state["m"] / (1 - beta1**power), state["v"] / (1 - beta2**power)
                u = m / (v.sqrt() + group["eps"]) + group["decay"] * p
                ratio = 1.0 if p.norm() == 0 or u.norm() == 0 else (p.norm() / u.norm()).item()
                low, high = group["trust"]
                p.sub_(group["lr"] * min(max(ratio, low), high) * u)


class Muon(torch.optim.Muon):
    """torch's, with iterations in float64 in place of bfloat16, written out."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            a, b, c = group["ns_coefficients"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                x = torch.lerp(p.grad, m, group["momentum"]) if group["nesterov"] else m
                x = x / x.norm().clamp(min=group["eps"])
                for _ in range(group["ns_steps"]):
                    x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
                rows, columns = p.shape
                factor = max(1, rows / columns) ** 0.5
                if group["adjust_lr_fn"] == "match_rms_adamw":
                    factor = 0.2 * max(rows, columns) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * factor * x)


LAMB: dict[str, tuple[fp.optim.Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "lamb": (
        fp.optim.lamb(0.01),
        lambda ps: Lamb(ps, lr=0.01, betas=(0.9, 0.999), eps=1e-6, decay=0.0, trust=(0.0, float("inf"))),
    ),
    "lamb, all options": (
        fp.optim.lamb(0.02, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.3, trust=(0.3, 1.2), bias_correction=False),
        lambda ps: Lamb(ps, lr=0.02, betas=(0.8, 0.95), eps=1e-8, decay=0.3, trust=(0.3, 1.2), correct=False),
    ),
}


ADAFACTOR: dict[str, tuple[fp.optim.Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "adafactor": (fp.optim.adafactor(), lambda ps: torch.optim.Adafactor(ps)),
    "adafactor, all options": (
        fp.optim.adafactor(0.05, beta2_decay=-0.6, eps=(1e-6, 1e-2), d=1.5, weight_decay=0.2),
        lambda ps: torch.optim.Adafactor(ps, 0.05, -0.6, (1e-6, 1e-2), 1.5, 0.2),
    ),
}

#: elementwise ones
TABLE: dict[str, tuple[fp.optim.Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (fp.optim.sgd(0.1), lambda ps: torch.optim.SGD(ps, 0.1)),
    "momentum": (fp.optim.sgd(0.1, momentum=0.9), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)),
    "nesterov with decay": (
        fp.optim.sgd(0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
        lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
    ),
    "decay alone": (fp.optim.sgd(0.1, weight_decay=0.2), lambda ps: torch.optim.SGD(ps, 0.1, weight_decay=0.2)),
    "dampening": (
        fp.optim.sgd(0.1, momentum=0.9, dampening=0.5),
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, dampening=0.5),
    ),
    "adagrad": (fp.optim.adagrad(0.1), lambda ps: torch.optim.Adagrad(ps, 0.1)),
    "adagrad, all options": (
        fp.optim.adagrad(0.2, lr_decay=0.1, weight_decay=0.3, initial_accumulator_value=0.5, eps=1e-6),
        lambda ps: torch.optim.Adagrad(ps, 0.2, 0.1, 0.3, 0.5, 1e-6),
    ),
    "adam": (fp.optim.adam(0.01), lambda ps: torch.optim.Adam(ps, 0.01)),
    "adam, all options": (
        fp.optim.adam(0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
        lambda ps: torch.optim.Adam(ps, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    ),
    "lion": (fp.optim.lion(0.01, betas=(0.8, 0.9), weight_decay=0.3), lambda ps: Lion(ps, 0.01, (0.8, 0.9), 0.3)),
    "adamw": (fp.optim.adamw(0.01), lambda ps: torch.optim.AdamW(ps, 0.01)),
    "adamw, all options": (
        fp.optim.adamw(0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
        lambda ps: torch.optim.AdamW(ps, 0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    ),
}

ALL = {**TABLE, **ADAFACTOR, **LAMB}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    torch.manual_seed(0)
    return {"a": torch.randn(3, 5, dtype=dtype), "layers": [torch.randn(7, dtype=dtype), torch.randn((), dtype=dtype)]}


def gradient(params: Any, step: int) -> Any:
    """Something that depends on the parameters, so that an error grows from step to step."""

    def of_one(p: Tensor) -> Tensor:
        waves = torch.sin(3 * as_real(p) + step)
        return (torch.view_as_complex(waves) if p.is_complex() else waves) + 0.1 * p

    return optree.tree_map(of_one, params)


def run(optimizer: fp.optim.Optimizer, params: Any, steps: int = STEPS) -> tuple[Any, Any]:
    state = optimizer.init(params)
    for step in range(steps):
        params, state = optimizer.update(gradient(params, step), state, params)
    return params, state


def run_torch(make: Callable[[Any], torch.optim.Optimizer], params: Any, steps: int = STEPS) -> Any:
    params = optree.tree_map(torch.clone, params)
    leaves = optree.tree_leaves(params)
    optimizer = make(leaves)
    for step in range(steps):
        for leaf, grad in zip(leaves, optree.tree_leaves(gradient(params, step)), strict=True):
            leaf.grad = grad
        optimizer.step()
    return params


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("name", ALL)
def test_ten_steps_equal_torchs(name: str) -> None:
    ours, theirs = ALL[name]
    assert_close(run(ours, parameters())[0], run_torch(theirs, parameters()))


MUON: dict[str, dict[str, Any]] = {
    "muon": {"lr": 0.02},
    "muon, all options": {
        "lr": 0.05,
        "weight_decay": 0.2,
        "momentum": 0.8,
        "nesterov": False,
        "ns_coefficients": (2.0, -1.5, 0.5),
        "ns_steps": 7,
        "adjust_lr_fn": "match_rms_adamw",
    },
}


@pytest.mark.parametrize("name", MUON)
def test_ten_steps_of_muon_equal_torchs(name: str) -> None:
    """To 1e-12 with float64 iterations, and as closely as bfloat16 allows with torch's own."""
    torch.manual_seed(0)
    params = {"wide": torch.randn(3, 5, dtype=torch.float64), "tall": [torch.randn(6, 4, dtype=torch.float64)] * 2}
    exact = run(fp.optim.muon(**MUON[name], dtype=torch.float64), params)[0]
    assert_close(exact, run_torch(lambda ps: Muon(ps, **MUON[name]), params))
    theirs = run_torch(lambda ps: torch.optim.Muon(ps, **MUON[name]), params, 1)
    assert_close(run(fp.optim.muon(**MUON[name]), params, 1)[0], theirs, 2e-3)


def test_muon_takes_matrices_alone() -> None:
    with pytest.raises(ValueError, match=r"muon: layers/0, layers/1: not a real matrix.*by_path"):
        fp.optim.muon(0.1).init(parameters())


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_are_updated_as_torch_does(name: str, dtype: torch.dtype) -> None:
    ours, theirs = TABLE[name]
    params, tolerance = parameters(dtype), 1e-12 if dtype == torch.complex128 else 1e-4
    assert_close(run(ours, params)[0], run_torch(theirs, params), tolerance)


def test_complex_parameters_that_lie_crosswise_or_are_conjugated() -> None:
    optimizer, w = fp.optim.adamw(0.1), torch.randn(3, 2, dtype=torch.complex128)
    want, _ = optimizer.update(w, optimizer.init(w), w)
    for same in (w.t().contiguous().t(), w.conj().resolve_conj().conj()):
        assert torch.equal(optimizer.update(same, optimizer.init(same), same)[0], want)


def test_values_of_complex_gradients_are_clipped_by_part() -> None:
    optimizer, w = fp.optim.clip_value(fp.optim.sgd(1.0), 0.5), torch.zeros(1, dtype=torch.complex64)
    assert optimizer.update(torch.tensor([3 - 0.25j]), optimizer.init(w), w)[0].item() == -0.5 + 0.25j


def test_adafactor_refuses_complex_parameters_as_torchs_does() -> None:
    params = {"w": torch.ones(2, 2, dtype=torch.complex64), "b": torch.ones(2)}
    with pytest.raises(ValueError, match=r"adafactor: w: complex parameters .* torch\.view_as_real"):
        fp.optim.adafactor().init(params)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_changed_in_place(name: str) -> None:
    optimizer, params = ALL[name][0], parameters()
    _, state = run(optimizer, params, 1)
    grads = gradient(params, 1)
    before = optree.tree_map(torch.clone, (params, state, grads))
    optimizer.update(grads, state, params)
    assert all(map(torch.equal, optree.tree_leaves(before), optree.tree_leaves((params, state, grads))))


@pytest.mark.parametrize("name", TABLE)
def test_an_update_of_parts_is_the_parts_of_the_update(name: str) -> None:
    """What sharding rests on: a shard's update needs nothing but the shard."""
    optimizer, whole = TABLE[name][0], torch.randn(8, dtype=torch.float64)
    parts = [run(optimizer, {"w": part})[0]["w"] for part in whole.chunk(2)]
    assert_close(torch.cat(parts), run(optimizer, {"w": whole})[0]["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_fused_kernel_is_the_formula(dtype: torch.dtype) -> None:
    p, g, m, v = (torch.randn(4099, dtype=dtype) for _ in range(4))  # 4099: a tail that the vector loop leaves over
    assert _torch.has_fused_adamw(p, torch.tensor(0.01)), (
        "this machine's torch has the kernel, so it is the one that runs"
    )
    args = (p, g, m, v * v, torch.tensor(3.0), torch.tensor(0.01, dtype=torch.float64), 0.9, 0.95, 1e-8, 0.1)
    tolerance = 8 * torch.finfo(dtype).eps
    assert_close(ADAMW(*args), adamw_formula(*args), tolerance)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    crosswise=st.booleans(),
)
def test_many_parameters_in_place_get_the_bits_of_one_at_a_time(
    sizes: list[int], dtype: torch.dtype, crosswise: bool
) -> None:
    generator = torch.Generator().manual_seed(sum(sizes))

    def draw(size: int) -> torch.Tensor:
        x = torch.rand(size, 3, generator=generator).to(dtype)
        return x.t() if crosswise else x

    rows = [tuple(draw(size) for _ in range(4)) for size in sizes]
    options = (torch.tensor(3.0), torch.tensor(0.01, dtype=torch.float64), 0.9, 0.95, 1e-8, 0.1)
    wanted = [ADAMW(*row, *options) for row in rows]
    p, g, m, v = zip(*rows, strict=True)
    updated = ADAMW_IN_PLACE([*p, *m, *v], g, *options)
    for x, held, want in zip(
        updated, [*p, *m, *v], [x for column in zip(*wanted, strict=True) for x in column], strict=True
    ):
        assert torch.equal(x, want)
        assert x.data_ptr() == held.data_ptr()


@pytest.mark.parametrize("crosswise", [False, True])
def test_other_devices_update_tensors_as_they_are(crosswise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the CPU's kernel needs full vectors. On a GPU each copy of a part of a tensor is a kernel."""
    monkeypatch.setattr(adamw_kernel, "in_main_memory", lambda x: False)
    rows = [tuple(torch.rand(3, size, dtype=torch.float64) for _ in range(4)) for size in (7, 70)]
    rows = [tuple(x.t() for x in row) for row in rows] if crosswise else rows
    options = (torch.tensor(3.0), torch.tensor(0.01, dtype=torch.float64), 0.9, 0.95, 1e-8, 0.1)
    wanted = [x for kind in zip(*(adamw_formula(*row, *options) for row in rows), strict=True) for x in kind]
    p, g, m, v = zip(*rows, strict=True)
    with Count() as mode:
        found = adamw_kernel._adamw_([*p, *m, *v], g, *options)
    assert all(a is b for a, b in zip(found, [*p, *m, *v], strict=True))
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, 8 * torch.finfo(torch.float64).eps)
    seen = [op for op in mode.seen if op is not torch.ops.aten._local_scalar_dense.default]
    assert crosswise or seen == [torch.ops.aten.full.default, torch.ops.aten._fused_adamw_.default]


@pytest.mark.parametrize("wrong", [1, 2, 3])
@pytest.mark.parametrize("other", [torch.ones(4, 2), torch.ones(4, 64).double()], ids=["shape", "dtype"])
def test_the_kernel_refuses_what_it_would_write_beside(wrong: int, other: Tensor) -> None:
    """In torch's own kernel this is a write out of bounds."""
    operands = [torch.ones(4, 64) for _ in range(4)]
    operands[wrong] = other
    p, g, m, v = operands
    options = (torch.ones(()), torch.ones((), dtype=torch.float64), 0.9, 0.99, 1e-8, 0.0)
    told = ("gradient", "mean", "square")[wrong - 1]
    with pytest.raises(ValueError, match=rf"of one shape and dtype, not parameter .*{told} \(4, "):
        fp.optim.adamw(0.1).update({"w": g}, fp.optim.AdamWState(torch.zeros(()), {"w": m}, {"w": v}), {"w": p})
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in operands]
        with pytest.raises(ValueError, match="of one shape and dtype"):
            ADAMW_IN_PLACE(
                [fakes[0], fakes[2], fakes[3]], [fakes[1]], *map(mode.from_tensor, options[:2]), *options[2:]
            )


def test_the_rate_may_be_a_function_of_the_steps_done() -> None:
    """A linear warm-up: what `LambdaLR` gives torch's SGD."""
    ours, _ = run(fp.optim.sgd(lambda step: 0.1 * torch.clamp((step + 1) / 4, max=1.0), momentum=0.9), parameters())
    theirs = optree.tree_map(torch.clone, parameters())
    leaves = optree.tree_leaves(theirs)
    optimizer = torch.optim.SGD(leaves, 0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, (step + 1) / 4)
        for leaf, grad in zip(leaves, optree.tree_leaves(gradient(theirs, step)), strict=True):
            leaf.grad = grad
        optimizer.step()
    assert_close(ours, theirs)


def test_a_schedule_sees_zero_first_and_counts_up() -> None:
    seen: list[float] = []

    def rate(step: Tensor) -> float:
        seen.append(float(step))
        return 0.1

    run(fp.optim.adamw(rate), parameters(), 3)
    assert seen == [0.0, 1.0, 2.0]


def test_leaves_that_are_no_floating_tensors_stay() -> None:
    params = {"w": torch.ones(2), "count": torch.tensor(3), "name": "layer"}
    grads = {"w": torch.ones(2), "count": torch.zeros(()), "name": None}
    for optimizer in (
        fp.optim.sgd(0.5),
        fp.optim.sgd(0.5, momentum=0.9),
        fp.optim.adam(0.5, weight_decay=1.0, eps=0.0),
        fp.optim.lion(0.5),
        fp.optim.adafactor(0.5),
        fp.optim.clip_value(fp.optim.sgd(1.0), 0.5),
    ):
        state = optimizer.init(params)
        new, _ = optimizer.update(grads, state, params)
        assert new["w"].tolist() == pytest.approx([0.5, 0.5], rel=1e-6)
        assert new["count"] is params["count"] and new["name"] == "layer"
