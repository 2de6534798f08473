"""Moments in 8 bits: their error, the same bits on every mesh, bytes, checkpoints, and the loss curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..passes.networks import batch, loss, parameters

SHAPES = {"a": (6, 20), "b": (4, 9), "c": (14,), "small": (3,)}
Q = fp.optim.quantised
OPTIMIZERS = {
    "adamw": lambda **how: Q(fp.optim.adamw(0.1, weight_decay=0.1, decay={"b": False, "*": True}), **how),
    "sgd": lambda **how: Q(fp.optim.sgd(0.1, momentum=0.9), **how),
    "lion": lambda **how: Q(fp.optim.lion(fp.optim.schedules.linear(0.1, 0.0, 9)), **how),
    "adagrad": lambda **how: Q(fp.optim.adagrad(0.1, initial_accumulator_value=0.5), **how),
    "inside": lambda **how: fp.optim.by_path(
        {"a": Q(fp.optim.adamw(0.1), **how), "*": fp.optim.sgd(0.1, momentum=0.5)}
    ),
    "outside": lambda **how: Q(
        fp.optim.by_path({"a": fp.optim.adamw(0.1), "*": fp.optim.sgd(0.1, momentum=0.5)}), **how
    ),
    "lamb": lambda **how: Q(fp.optim.lamb(0.1), **how),  # its norms of parameters are sums over ranks
}


def linear(params: Any, scales: Any) -> torch.Tensor:
    """Its gradient is a sum of integers, so it has the same bits on every mesh."""
    return sum((params[name] * scales[name]).sum() for name in params)  # type: ignore[return-value]


def arguments(step: int, samples: int = 4) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(step)
    drawn = {name: torch.randint(-9, 10, (samples, *shape), generator=make) for name, shape in SHAPES.items()}
    return {name: x.double() * 10.0 ** torch.arange(samples).view(-1, *[1] * (x.ndim - 1)) for name, x in drawn.items()}


def params_of() -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=make, dtype=torch.float64) for name, shape in SHAPES.items()}


def run(optimizer: Any, plan: Any, mesh: Mesh, steps: int = 3, **options: Any) -> tuple[Any, Any]:
    train = fp.train_step(linear, optimizer, mesh, plan, **options)
    state = train.init(params_of())
    for step in range(steps):
        state, _ = train(state, arguments(step))
    return train, state


def leaves(train: Any, state: Any) -> list[torch.Tensor]:
    return [x for x in optree.tree_leaves(train.whole(state)) if isinstance(x, torch.Tensor)]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 17), st.integers(0, 99), st.sampled_from([torch.float64, torch.float32]))
def test_an_element_is_within_the_bound_and_no_element_becomes_zero(
    length: int, block: int, seed: int, dtype: torch.dtype
) -> None:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(3, length, generator=make, dtype=torch.float64) * 10.0 ** torch.randint(
        -12, 3, (3, length), generator=make
    )
    x = torch.where(torch.rand(3, length, generator=make) < 0.2, 0.0, x).to(dtype)

    def keep(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return params, (state[0], grads)

    inner = fp.optim.Optimizer(
        lambda params: (torch.tensor(0), optree.tree_map(torch.zeros_like, params)), keep, elementwise=True
    )
    optimizer = fp.optim.quantised(inner, block=block, whole_below=0)
    params = {"w": torch.zeros(3, length, dtype=dtype)}
    seen: list[torch.Tensor] = []
    _, state = optimizer.update({"w": x}, optimizer.init(params), params)
    spying = inner._replace(
        update=lambda grads, state, params: (seen.append(state[1][0]), keep(grads, state, params))[1]
    )
    fp.optim.quantised(spying, block=block, whole_below=0).update({"w": x}, state, params)
    (found,) = seen
    padded = torch.nn.functional.pad(x.double(), (0, -length % block)).unflatten(-1, (-1, block))
    s = (padded.abs().amax(-1, keepdim=True).sqrt() / 127).expand_as(padded).flatten(-2)[:, :length]
    assert ((found.double() - x.double()).abs() <= (s * x.double().abs().sqrt() + s * s) * (1 + 1e-4)).all()
    assert torch.equal(found.sign(), x.sign())


@settings(max_examples=4, deadline=None)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    stage=st.integers(0, 3),
    ranks=st.sampled_from([2, 4]),
    tensor=st.sampled_from([None, P("tensor"), P(None, "tensor")]),
    block=st.sampled_from([4, 7, 256]),
)
def test_a_state_has_the_same_bits_on_every_mesh(name: str, stage: int, ranks: int, tensor: Any, block: int) -> None:
    optimizer = OPTIMIZERS[name](block=block, whole_below=10)
    one = run(optimizer, fp.zero(0, "data"), Mesh(data=1))
    others = {} if tensor is None else {"tensor": 2}
    inner = [fp.tensor_parallel("tensor", {"a": tensor, "b": P("tensor"), "*": P()})] if others else []
    other = run(optimizer, fp.chain(*inner, fp.zero(stage, "data")), Mesh(data=ranks, **others))
    for a, b in zip(leaves(*one), leaves(*other), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=1e-3, atol=1) if name == "lamb" else torch.equal(a, b)
    assert any(x.dtype == torch.int8 for x in leaves(*other))


def test_a_run_goes_on_from_another_mesh_with_the_same_bits(tmp_path: Path) -> None:
    optimizer = fp.optim.ema(fp.optim.quantised(fp.optim.adamw(0.1), block=7, whole_below=10))
    plans = [(fp.zero(3, "data"), Mesh(data=4)), (fp.zero(1, "data"), Mesh(data=2))]
    (saved, state), (other, _) = (run(optimizer, plan, mesh, 2) for plan, mesh in plans)
    saved.save(state, tmp_path / "saved")
    found = other.restore(tmp_path / "saved", like=params_of())
    assert all(map(torch.equal, leaves(saved, state), leaves(other, found)))
    after = [train(each, arguments(9))[0] for train, each in ((saved, state), (other, found))]
    assert all(map(torch.equal, leaves(saved, after[0]), leaves(other, after[1])))


def affine(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"] + params["b"]).square().sum()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_has_the_bytes_that_are_predicted(stage: int) -> None:
    """Of Adam: two bytes per element in place of eight, and two scales per block of a row. The peak falls as much."""
    params, x, found = {"w": torch.zeros(64, 512), "b": torch.zeros(512)}, torch.zeros(4, 64), []
    for optimizer in (fp.optim.adamw(0.1), fp.optim.quantised(fp.optim.adamw(0.1))):
        train = fp.train_step(affine, optimizer, Mesh(data=4), fp.zero(stage, "data"))
        state = train.init(params)
        moments = [handle[0] for handle in state.handles[2:] if isinstance(handle, list) and handle[0].ndim == 2]
        found.append((sum(each.nbytes for each in moments), train.lower(state, x).memory().peak))
    (plain, before), (fewer, after) = found
    assert plain == 8 * 64 * 512 // 4 and fewer == 2 * (64 * 512 + 64 * 2 * 4) // 4
    assert before - after >= (plain - fewer) * 0.9


def curve(optimizer: Any, steps: int = 30) -> list[float]:
    plan = fp.chain(fp.mixed_precision("bf16"), fp.zero(3, "data"))
    train = fp.train_step(loss, optimizer, Mesh(data=2), plan)
    state = train.init(optree.tree_map(torch.Tensor.float, parameters(2, 16)))
    x, y = batch(32, 16)
    losses = []
    for _ in range(steps):
        state, metrics = train(state, x.float(), y)
        losses.append(metrics.loss.item())
    return losses


def test_the_loss_curve_is_that_of_the_inner_optimizer() -> None:
    exact, close = (
        curve(each) for each in (fp.optim.adamw(0.01), fp.optim.quantised(fp.optim.adamw(0.01), whole_below=10))
    )
    assert close[-1] < close[0] / 4
    assert max(abs(a - b) for a, b in zip(exact, close, strict=True)) < 0.03 * exact[0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fp.optim.quantised(0.1), TypeError, "takes an fp.optim.Optimizer"),  # type: ignore[arg-type]
        (lambda: fp.optim.quantised(fp.optim.adamw(0.1), "int4"), ValueError, "the format is 'int8'"),
        (
            lambda: fp.optim.quantised(fp.optim.Optimizer(lambda p: (), lambda g, s, p: (p, s))),
            ValueError,
            "given shards",
        ),
        (lambda: fp.optim.quantised(fp.optim.adamw(0.1), block=0), ValueError, "numbers of elements"),
        (
            lambda: fp.optim.quantised(fp.optim.delayed(fp.optim.adamw(0.1))).init(params_of()),
            ValueError,
            r"delayed\(quantised",
        ),
        (
            lambda: fp.optim.quantised(fp.optim.ema(fp.optim.adamw(0.1))).init(params_of()),
            ValueError,
            r"ema\(quantised",
        ),
        (
            lambda: run(fp.optim.quantised(fp.optim.adamw(0.1)), fp.zero(1, "data", layout="flat"), Mesh(data=2)),
            ValueError,
            "flat",
        ),
    ],
)
def test_refused(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_state_with_other_blocks_is_refused(tmp_path: Path) -> None:
    def train(block: int) -> Any:
        optimizer = fp.optim.quantised(fp.optim.sgd(1.0, momentum=0.9), block=block, whole_below=1)
        return fp.train_step(lambda p, x: (p["w"] * x.mean()).sum(), optimizer, Mesh(data=1), fp.data_parallel("data"))

    first, other = train(256), train(200)
    state, _ = first(first.init({"w": torch.zeros(1, 300)}), torch.ones(2))
    first.save(state, tmp_path / "state")
    with pytest.raises(ValueError, match=r"quantised\(block=200\) was given a state with blocks of 256"):
        other(other.restore(tmp_path / "state"), torch.ones(2))


def test_averages_and_held_gradients_inside_of_by_path_are_refused() -> None:
    params = {"w": torch.ones(1, 4096)}
    for inner in (fp.optim.ema(fp.optim.sgd(0.1), 0.9), fp.optim.delayed(fp.optim.sgd(0.1))):
        with pytest.raises(ValueError, match=r"would quantise more than moments: write (ema|delayed)\(quantised"):
            fp.optim.quantised(fp.optim.by_path({"*": inner})).init(params)
