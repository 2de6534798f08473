"""A training step under any plan is the plain torch loop: the same losses, norms and parameters, step after step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.runtime import SimulatedRuntime
from functional_parallel.runtime.default import use_runtime
from sharding_specs import Mesh, P

from ..trees import assert_close, assert_equal

STEPS = 6
RULES = {"first/w": P(None, "tensor"), "first/b": P("tensor"), "second/w": P("tensor")}
TENSOR = fp.tensor_parallel("tensor", RULES)
SQUARE = Mesh(data=2, tensor=2)

PLANS: dict[str, tuple[Any, Mesh]] = {
    "nothing": (None, Mesh(data=1)),
    "replicas": (None, SQUARE),
    "data_parallel": (fp.data_parallel("data"), Mesh(data=2)),
    "zero 1": (fp.zero(1, "data"), Mesh(data=2)),
    "zero 2": (fp.zero(2, "data"), Mesh(data=4)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=4)),
    "tensor": (TENSOR, Mesh(tensor=2)),
    "tensor, idle data axis": (TENSOR, SQUARE),
    "tensor and data": (fp.chain(TENSOR, fp.data_parallel("data")), SQUARE),
    "tensor and zero 1": (fp.chain(TENSOR, fp.zero(1, "data")), SQUARE),
    "tensor and zero 3": (fp.chain(TENSOR, fp.zero(3, "data")), SQUARE),
    "tensor and zero 3, other order of axes": (fp.chain(TENSOR, fp.zero(3, "data")), Mesh(tensor=4, data=2)),
}

OPTIMIZERS: dict[str, tuple[fp.optim.Optimizer, Callable[[Any], torch.optim.Optimizer], float | None]] = {
    "sgd": (
        fp.optim.sgd(0.2, momentum=0.9, weight_decay=0.01),
        lambda ps: torch.optim.SGD(ps, 0.2, momentum=0.9, weight_decay=0.01),
        None,
    ),
    "adamw": (fp.optim.adamw(0.05), lambda ps: torch.optim.AdamW(ps, 0.05), None),
    "adamw, clipped": (fp.optim.adamw(0.05), lambda ps: torch.optim.AdamW(ps, 0.05), 0.3),
}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype) / 2  # noqa: E731
    return {
        "first": {"w": draw(4, 8), "b": draw(8)},
        "second": {"w": draw(8, 3), "b": draw(3)},  # 3 divides by no axis: stays whole at every stage
        "scale": draw(),
    }


def batches(steps: int = STEPS, rows: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 4, generator=generator, dtype=torch.float64),
            torch.randint(3, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


def scores(params: dict[str, Any], x: Tensor) -> Tensor:
    hidden = torch.tanh(x.to(params["scale"].dtype) @ params["first"]["w"] + params["first"]["b"])
    return (hidden @ params["second"]["w"] + params["second"]["b"]) * (1 + params["scale"])


def loss(params: dict[str, Any], x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores(params, x), labels)


def plain_loop(
    make: Callable[[Any], torch.optim.Optimizer], clip: float | None
) -> tuple[list[float], list[float], Any]:
    params = optree.tree_map(lambda leaf: leaf.clone().requires_grad_(), parameters())
    leaves = optree.tree_leaves(params)
    optimizer = make(leaves)
    losses, norms = [], []
    for batch in batches():
        optimizer.zero_grad()
        value = loss(params, *batch)
        value.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(leaves, clip or float("inf")).item())
        optimizer.step()
        losses.append(value.item())
    return losses, norms, optree.tree_map(Tensor.detach, params)


def run(train: Any, state: Any, data: list[Any]) -> tuple[list[float], list[float], Any]:
    losses, norms = [], []
    for batch in data:
        state, metrics = train(state, *batch)
        losses.append(metrics.loss.item())
        norms.append(metrics.grad_norm.item())
    return losses, norms, state


# -----------------------------------------------------------------------------
# The same numbers
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.every(4)
def test_every_plan_is_the_plain_loop(plan: str, optimizer: str) -> None:
    ours, theirs, clip = OPTIMIZERS[optimizer]
    transform, mesh = PLANS[plan]
    train = fp.train_step(loss, ours, mesh, transform, clip=clip)
    losses, norms, state = run(train, train.init(parameters()), batches())
    assert_close((losses, norms, train.params(state)), plain_loop(theirs, clip))
    if clip is not None:
        assert max(norms) > clip, "the bound was felt"


def quadratic(params: dict[str, Any], x: Tensor) -> Tensor:
    y = x @ params["first"] @ params["second"] - params["bias"]
    return (y * y.conj()).real.sum()


@settings(max_examples=7, deadline=None)
@given(
    fp.testing.strategies.plans({"first": P(None, "tensor"), "second": P("tensor")}),
    st.integers(1, 3),
    st.sampled_from([fp.optim.sgd(0.25), fp.optim.sgd(0.25, momentum=0.5), fp.optim.lion(0.25)]),
    st.booleans(),
)
def test_complex_parameters_are_those_of_one_rank(plan: Any, columns: int, optimizer: Any, donate: bool) -> None:
    """Exactly: all of it is closed on the integers, and on their quarters."""
    (transform, mesh), generator = plan, torch.Generator().manual_seed(columns)

    def draw(*shape: int) -> Tensor:
        return torch.complex(*torch.randint(-1, 2, (2, *shape), generator=generator).double())

    params = {"first": draw(3, 4), "second": draw(4, columns), "bias": draw(columns)}
    x, runs = draw(16, 3), []
    for place, on in ((None, Mesh(data=1)), (transform, mesh)):
        train = fp.train_step(quadratic, optimizer, on, place, donate=donate)
        state, metrics = train(train.init(params), x)
        after, second = train(state, x)
        runs.append((train.whole(after), metrics, second.loss))
    assert_equal(runs[1], runs[0])
    wanted = [g.abs().square().sum() for g in optree.tree_leaves(fp.grad(quadratic)(params, x))]
    assert_close(metrics.grad_norm, sum(wanted).sqrt())
    assert not torch.equal(train.params(after)["bias"], params["bias"])


@pytest.mark.parametrize("plan", ["data_parallel", "zero 1", "zero 3"])
def test_a_schedule_counts_steps(plan: str) -> None:
    transform, mesh = PLANS[plan]
    schedule = lambda step: 0.1 * 0.5**step  # noqa: E731
    params, rate = parameters(), 0.1
    train = fp.train_step(loss, fp.optim.sgd(schedule), mesh, transform)
    _, _, state = run(train, train.init(params), batches())
    for batch in batches():
        grads = fp.grad(loss)(params, *batch)
        params = optree.tree_map(lambda p, g, rate=rate: p - rate * g, params, grads)
        rate /= 2
    assert_close(train.params(state), params)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_keeps_only_a_share_of_what_it_says(stage: int) -> None:
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=4), fp.zero(stage, "data"))
    state = train.init(parameters())
    held = [handle[0].numel() for handle in state.handles]
    whole = [leaf.numel() for leaf in optree.tree_leaves(train.whole(state))]
    count = len(optree.tree_leaves(parameters()))
    expected = [
        1 if numel == 1 else -(-numel // 4) for numel in whole
    ]  # scalars stay whole, a bias of 3 is padded to 4
    assert held[count:] == expected[count:], "optimizer state"
    assert held[:count] == (expected if stage == 3 else whole)[:count], "parameters"


# -----------------------------------------------------------------------------
# States
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["data_parallel", "zero 1", "tensor and zero 3"])
def test_states_are_values(plan: str) -> None:
    """Without donation, an old state can be used again, and gives the same again."""
    transform, mesh = PLANS[plan]
    train = fp.train_step(loss, fp.optim.adamw(0.05), mesh, transform, seed=0, donate=False)
    params = parameters()
    start = train.init(params)
    _, _, middle = run(train, start, batches()[:3])
    _, _, first = run(train, middle, batches()[3:])
    _, _, again = run(train, middle, batches()[3:])
    assert_equal(train.whole(first), train.whole(again))
    assert_equal(train.params(start), params)
    assert (start.step, middle.step, first.step) == (0, 3, 6)
    with pytest.raises(AttributeError):
        start.step = 1  # type: ignore[misc]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.every(8)
def test_donated_states_give_the_same_bits(plan: str, optimizer: str, deduplicate: bool) -> None:
    (transform, mesh), (ours, _, clip) = PLANS[plan], OPTIMIZERS[optimizer]
    use_runtime(SimulatedRuntime(mesh, deduplicate=deduplicate))
    kept, given = (
        fp.train_step(loss, ours, mesh, transform, clip=clip, donate=donate, bucket=64) for donate in (False, True)
    )
    params, before = parameters(), parameters()
    want_losses, want_norms, want = run(kept, kept.init(params), batches())
    losses, norms, end = run(given, given.init(params), batches())
    assert (losses, norms) == (want_losses, want_norms)
    assert_equal(given.whole(end), kept.whole(want))
    assert_equal(params, before)
    use_runtime(SimulatedRuntime(mesh))


@pytest.mark.parametrize("plan", ["nothing", "data_parallel", "zero 1", "tensor and zero 3"])
def test_a_donated_state_is_used_up(plan: str) -> None:
    transform, mesh = PLANS[plan]
    train = fp.train_step(loss, fp.optim.adamw(0.05), mesh, transform)
    start = train.init(parameters())
    first = batches()[0]
    kept, seen = train.copy(start), train.whole(start)
    copied = optree.tree_map(torch.clone, seen)
    after, _ = train(start, *first)
    for use in (train.params, train.whole, train.copy, lambda state: train(state, *first)):
        with pytest.raises(fp.DonatedStateError, match=r"of step 0.*train\.copy\(state\).*donate=False"):
            use(start)
    assert_equal(seen, copied)
    assert_equal(train.whole(kept), copied)
    again, _ = train(kept, *first)
    assert_equal(train.whole(again), train.whole(after))
    assert "donated" in repr(start) and repr(after) == f"TrainState(step=1, parameters=5, mesh={mesh!r})"


def test_a_refused_batch_uses_nothing_up() -> None:
    train = fp.train_step(loss, fp.optim.adamw(0.05), Mesh(data=2), fp.data_parallel("data"))
    state = train.init(parameters())
    with pytest.raises(ValueError, match="divi"):
        train(state, torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.int64))
    assert_equal(train.params(state), parameters())


@pytest.mark.parametrize("first, second", [("zero 1", "tensor and zero 3"), ("tensor and zero 3", "nothing")])
def test_whole_and_load_carry_a_run_to_another_mesh(first: str, second: str) -> None:
    def train_on(plan: str) -> Any:
        return fp.train_step(loss, fp.optim.adamw(0.05), PLANS[plan][1], PLANS[plan][0])

    before, after = train_on(first), train_on(second)
    _, _, state = run(before, before.init(parameters()), batches()[:3])
    saved = before.whole(state)
    loaded = after.load(*saved, state.step)
    assert loaded.step == 3
    assert_equal(after.whole(loaded), saved)
    losses, _, end = run(after, loaded, batches()[3:])
    want_losses, _, want = plain_loop(lambda ps: torch.optim.AdamW(ps, 0.05), None)
    assert_close((losses, after.params(end)), (want_losses[3:], want))


def test_init_takes_a_function_that_makes_the_parameters() -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"))
    assert_equal(train.params(train.init(parameters)), parameters())


# -----------------------------------------------------------------------------
# Signatures, auxiliary results, explanations
# -----------------------------------------------------------------------------


def test_a_smaller_last_batch_is_traced_once_more() -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"))
    state, big, small = train.init(parameters()), batches()[0], batches(rows=2)[0]
    programs = []
    for batch in (big, small, big, small):
        state, _ = train(state, *batch)
        programs.append(train.program)
    assert programs[0] is programs[2] and programs[1] is programs[3] and programs[0] is not programs[1]


def test_explain_counts_the_collectives_of_zero_3() -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"), clip=1.0, bucket=None)
    with pytest.raises(ValueError, match=r"has not run yet: take one step, or call train.lower\(state, batch\)"):
        train.explain()
    program = train.lower(train.init(parameters()), *batches()[0])
    kinds: dict[str, int] = {}
    for (kind, axes), count in program.counts().items():
        assert axes == ("data",)
        kinds[kind] = kinds.get(kind, 0) + count
    assert kinds["psum_scatter"] == 4, "one per parameter but the scalar"
    assert "psum_scatter" in str(train.explain())


@pytest.mark.parametrize("plan", ["nothing", "zero 3", "tensor and data"])
def test_auxiliary_results_come_back_whole(plan: str) -> None:
    def with_aux(params: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hits = x.sum(1) > labels
        return loss(params, x, labels), {"hits": hits.sum(), "rows": x * 2, "name": "rows", "count": 3}

    transform, mesh = PLANS[plan]
    train = fp.train_step(with_aux, fp.optim.sgd(0.1), mesh, transform, has_aux=True)
    x, labels = batches()[0]
    _, metrics = train(train.init(parameters()), x, labels)
    assert_close(metrics.loss, loss(parameters(), x, labels))
    assert torch.equal(metrics.aux["hits"], (x.sum(1) > labels).sum())
    assert torch.equal(metrics.aux["rows"], 2 * x)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.every(3)
def test_one_hot_of_what_is_computed_and_of_a_constant(plan: str) -> None:
    """In a derivative, where torch cannot see that there are no values to look at."""
    targets = torch.tensor([2, 0, 1])

    def chosen(params: Any, x: Tensor, labels: Tensor) -> Tensor:
        found = scores(params, x)
        weights = F.one_hot(found.argmax(-1), 3) + F.one_hot(labels, 3) * F.one_hot(targets, num_classes=3)[1]
        return (found * weights).mean()

    transform, mesh = PLANS[plan]
    params, batch = parameters(), batches()[0]
    gradients, value = fp.grad_and_value(chosen)(params, *batch)
    train = fp.train_step(chosen, fp.optim.sgd(1.0), mesh, transform)
    state, metrics = train(train.init(params), *batch)
    torch.testing.assert_close(metrics.loss, value, rtol=1e-12, atol=1e-12)
    wanted = optree.tree_map(torch.sub, params, gradients)
    for a, b in zip(optree.tree_leaves(train.params(state)), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# -----------------------------------------------------------------------------
# Randomness, precision
# -----------------------------------------------------------------------------


def noisy(params: dict[str, Any], x: Tensor, labels: Tensor) -> Tensor:
    hidden = torch.tanh(F.dropout(x, 0.3) @ params["first"]["w"] + params["first"]["b"])
    logits = F.dropout(hidden, 0.5) @ params["second"]["w"] + params["second"]["b"]
    return F.cross_entropy(logits * (1 + params["scale"]), labels)


def test_dropout_is_the_same_on_every_mesh_and_another_each_step() -> None:
    """One plan for each other mesh of `PLANS`."""
    plans = {repr(mesh): plan for plan, (_, mesh) in PLANS.items() if mesh.size > 1}

    def losses_under(plan: str, seed: int) -> list[float]:
        transform, mesh = PLANS[plan]
        train = fp.train_step(noisy, fp.optim.sgd(0.0), mesh, transform, seed=seed)  # rate 0: only the noise changes
        return run(train, train.init(parameters()), [batches()[0]] * 3)[0]

    reference = losses_under("nothing", 0)
    assert len(set(reference)) == 3, "every step draws anew"
    for plan in plans.values():
        assert_close(losses_under(plan, 0), reference)
    assert not set(losses_under("nothing", 1)) & set(reference), "another seed, other numbers"


def test_the_key_of_a_step_can_be_made_by_hand() -> None:
    train = fp.train_step(noisy, fp.optim.sgd(0.0), Mesh(data=2), fp.data_parallel("data"), seed=5)
    losses = run(train, train.init(parameters()), [batches()[0]] * 2)[0]
    for step, value in enumerate(losses):
        with fp.random.using(fp.random.fold_in(fp.random.key(5), step)):
            x, labels = batches()[0]
            w1, b1, w2, b2 = (
                parameters()[k][n] for k, n in [("first", "w"), ("first", "b"), ("second", "w"), ("second", "b")]
            )
            hidden = fp.random.dropout(torch.tanh(fp.random.dropout(x, 0.3) @ w1 + b1), 0.5)
            by_hand = F.cross_entropy((hidden @ w2 + b2) * (1 + parameters()["scale"]), labels)
        assert_close(value, by_hand)


@pytest.mark.parametrize("plan", ["data_parallel", "zero 1", "tensor and zero 3"])
def test_bfloat16_parameters_train(plan: str) -> None:
    transform, mesh = PLANS[plan]
    train = fp.train_step(loss, fp.optim.adamw(0.01), mesh, transform, clip=1.0)
    losses, norms, state = run(train, train.init(parameters(torch.bfloat16)), [batches()[0]] * 20)
    assert all(leaf.dtype == torch.bfloat16 for leaf in optree.tree_leaves(train.params(state)))
    assert losses[-1] < 0.9 * losses[0] and all(norm > 0 for norm in norms)
