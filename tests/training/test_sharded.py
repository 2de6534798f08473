"""Trees that stay on the ranks: programs with a state, parameters and states of a step, their moves and their files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P, SpecError

from ..processes import run_on_processes
from ..storages import STORAGES

COLUMNS = {"w": P(None, "tensor")}
PLANS: dict[str, tuple[Any, Mesh, Any]] = {  # plan, mesh, specs of the parameters at rest
    "none": (None, Mesh(data=2), P()),
    "data": (fp.data_parallel("data", batch=(P(), P("data"))), Mesh(data=2), P()),
    "zero 1": (fp.zero(1, "data", batch=(P(), P("data"))), Mesh(data=4), P()),
    "zero 3": (fp.zero(3, "data", batch=(P(), P("data"))), Mesh(data=2), P("data")),
    "tensor": (fp.tensor_parallel("tensor", COLUMNS), Mesh(tensor=2), P(None, "tensor")),
    "both": (
        fp.chain(fp.tensor_parallel("tensor", COLUMNS), fp.data_parallel("data", batch=(P(), P("data")))),
        Mesh(data=2, tensor=2),
        P(None, "tensor"),
    ),
}


def same(a: Any, b: Any) -> bool:
    return all(optree.tree_leaves(optree.tree_map(torch.equal, a, b)))


def step(params: Any, state: Any, x: Tensor) -> Any:
    """Accumulate products over the calls; in integers, which float64 adds exactly in any order."""
    y = x @ params["w"]
    total = state["total"] + y.sum()
    return y * state["count"], {"total": total, "count": state["count"] + 1, "last": state["last"] + total * 2}


def begin() -> Any:
    return {"total": torch.zeros(()).double(), "count": torch.ones(()).double(), "last": torch.zeros(3).double()}


def compiled(f: Any, plan: str, **options: Any) -> Any:
    transform, mesh, _ = PLANS[plan]
    if transform is None:
        return fp.compile(f, mesh, in_specs=(P(), P(), P()), out_specs=P(), state=1, **options)
    return fp.compile(transform(f), mesh, state=1, **options)


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_program_with_state_equals_the_function(data: st.DataObject) -> None:
    plan = data.draw(st.sampled_from(sorted(PLANS)))
    rows, inner, seed = 4 * data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)), data.draw(st.integers(0, 99))
    params, state = {"w": integers(inner, 4, seed=seed)}, begin()
    _, mesh, spec = PLANS[plan]
    run, held = compiled(step, plan), begin()
    given_first = data.draw(st.booleans()) and inner % mesh.shape.get("data", 1) == 0
    weights = fp.Sharded.of(params, mesh, spec) if given_first else params
    for call in range(data.draw(st.integers(1, 4))):
        x = integers(rows, inner, seed=seed + call)
        expected, state = step(params, state, x)
        found, held = run(weights, held, x)
        assert torch.equal(found, expected)
        assert isinstance(held, fp.Sharded) and same(held.full(), state)
    assert held.mesh == mesh


def cached(weights: Tensor, cache: Tensor, x: Tensor) -> Any:
    """A step of generation: append to a cache of the last positions, and read all of it."""
    cache = torch.cat([cache[:, 1:], (x @ weights)[:, None]], 1)
    return cache.sum(1), cache


def generated(plan: Any, mesh: Mesh) -> Any:
    run, cache, found = fp.compile(plan(cached), mesh, state=1), torch.zeros(4, 3, 2).double(), []
    for call in range(5):
        y, cache = run(integers(4, 2, seed=0), cache, integers(4, 4, seed=call))
        found.append(y)
    return found, cache


def test_a_cache_is_sharded_like_the_batch() -> None:
    found, cache = generated(fp.zero(3, "data"), Mesh(data=2))
    assert cache.specs == P("data") and [shard.shape[0] for shard in cache.handles[0]] == [2, 2]
    wanted, plain = generated(fp.data_parallel("data"), Mesh(data=1))
    assert same(found, wanted) and same(cache.full(), plain.full())


ADAMW = fp.optim.adamw(0.1)


def trained_by_hand(scale: Tensor, state: Any, x: Tensor) -> Any:
    """A step with an optimizer that is written by hand."""
    params, moments = state
    gradients, value = fp.grad_and_value(lambda w, x: ((x @ w) * scale).square().mean())(params, x)
    gradients = gradients / 2  # summed over the ranks, as every rank has the same parameters
    return fp.psum(value, "data") / 2, ADAMW.update(gradients, moments, params)


def test_the_memory_of_the_state_is_used_again() -> None:
    run = fp.compile(
        trained_by_hand, Mesh(data=2), in_specs=(P(), P(), P("data")), out_specs=P(), state=1, name="by hand"
    )
    w, x, scale = torch.ones(4), torch.eye(4), torch.tensor(2.0)
    plain = fp.train_step(lambda w, x: ((x @ w) * scale).square().mean(), ADAMW, Mesh(data=2), fp.data_parallel("data"))
    train_state, _ = plain(plain.init(w), x)
    begun = w, ADAMW.init(w)
    value, first = run(scale, begun, x)
    torch.testing.assert_close(first.full()[0], plain.params(train_state))
    assert torch.equal(w, torch.ones(4)) and not begun[1][1].any()
    places = [handle[0].data_ptr() for handle in first.handles[::2]]
    later, second = run(scale, first, x)
    assert later < value and [handle[0].data_ptr() for handle in second.handles[::2]] == places
    with pytest.raises(fp.DonatedStateError, match=r"use the call's result, or give it x.copy\(\) to keep x"):
        run(scale, first, x)
    kept, before = second.copy(), second.full()
    run(scale, kept, x)
    assert same(second.full(), before) and "donated" in repr(kept)


def test_results_do_not_share_the_memory_of_the_state() -> None:
    def f(params: Tensor, state: Tensor) -> Any:
        return state, params  # the old state as a result, the parameters as the new state

    run = fp.compile(f, Mesh(data=2), in_specs=(P(), P()), out_specs=P(), state=1)
    params = fp.Sharded.of(torch.ones(3), Mesh(data=2), P())
    old, state = run(
        params,
        torch.zeros(3),
    )
    newer = fp.compile(lambda p, s: (s + 0, s + 5), Mesh(data=2), in_specs=(P(), P()), out_specs=P(), state=1)
    newer(params, state)
    assert torch.equal(params.full(), torch.ones(3)) and not old.any()


def test_one_tree_as_parameters_and_as_state() -> None:
    run = fp.compile(lambda p, s: (p.sum(), s + p), Mesh(data=2), in_specs=(P(), P()), out_specs=P(), state=1)
    tree = fp.Sharded.of(torch.ones(3), Mesh(data=2), P())
    _, state = run(tree, tree)
    assert torch.equal(state.full(), torch.full((3,), 2.0)) and torch.equal(tree.full(), torch.ones(3))


def test_a_state_that_is_stored_in_another_form() -> None:
    specs = (P(), P("data", form="negative"))
    run = fp.compile(lambda p, s: (p, s + 1), Mesh(data=2), in_specs=specs, out_specs=specs, state=1)
    state = torch.zeros(4)
    for _ in range(3):
        _, state = run(torch.ones(()), state)
    assert torch.equal(state.full(), torch.full((4,), 3.0)) and torch.equal(state.handles[0][0], torch.full((2,), -3.0))


ROWS = (P(), P("data"))
WRONG: dict[str, tuple[Any, Any, str]] = {
    "layout": (lambda p, s: (p.sum(), fp.psum(s, "data")), P(), r"1: P\('data'\), .*, in the result P\(\), shards of"),
    "dtype": (
        lambda p, s: (p, s.double()),
        ROWS,
        r"of float32\[2\], in the result P\('data'\), shards of float64",
    ),
    "shape": (lambda p, s: (p, s[:1]), ROWS, r"shards of float32\[1\]"),
    "structure": (lambda p, s: (p, [s]), ROWS, "with the structure of the old one"),
    "no pair": (lambda p, s: s, P("data"), r"must return \(result, new state\)"),
}


def test_the_state_is_an_argument() -> None:
    run = fp.compile(lambda p, s: (p, s), Mesh(data=2), in_specs=(P(), P()), out_specs=P(), state=2)
    with pytest.raises(ValueError, match=r"state at index 2 of its arguments, and takes 2"):
        run(torch.ones(2), torch.ones(2))
    for wrong in ("cache", -1, 1.5):
        with pytest.raises(ValueError, match="index of the argument that is the state"):
            fp.compile(fp.zero(3, "data")(lambda w, c, x: (w.sum(), c)), Mesh(data=2), state=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WRONG)
def test_a_new_state_must_lie_like_the_old_one(name: str) -> None:
    f, out_specs, message = WRONG[name]
    run = fp.compile(f, Mesh(data=2), in_specs=(P(), P("data")), out_specs=out_specs, state=1)
    with pytest.raises((fp.OutSpecError, TypeError), match=message):
        run(torch.ones(2), torch.zeros(4))


def test_a_wrong_layout_names_path_and_both_specs() -> None:
    run = fp.compile(fp.zero(3, "data")(lambda p, x: x @ p["w"]), Mesh(data=2))
    weights = fp.Sharded.of({"w": torch.ones(4, 2)}, Mesh(data=2), P())
    with pytest.raises(
        SpecError, match=r"argument 0/w: P\(\) in the Sharded, P\('data'\) for .*\n.*x.relayout\(specs, mesh\)"
    ):
        run(weights, torch.ones(2, 4))
    assert torch.equal(run(weights.relayout(P("data")), torch.ones(2, 4)), torch.full((2, 2), 4.0))
    with pytest.raises(SpecError, match=r"it lies on Mesh\(data=4\), and .* runs on Mesh\(data=2\)"):
        run(weights.relayout(P("data"), Mesh(data=4)), torch.ones(2, 4))


SPECS = [P(), P("a"), P("b"), P(("a", "b")), P("b", "a"), P(None, "a")]


@settings(max_examples=25, deadline=None)
@given(
    held=st.sampled_from(SPECS),
    wanted=st.sampled_from(SPECS),
    meshes=st.permutations([2, 1, 4]),
    stored=st.tuples(STORAGES, STORAGES),
)
def test_relayout_is_the_identity_of_values(held: P, wanted: P, meshes: list[int], stored: Any) -> None:
    held, wanted = held.replace(storage=stored[0]), wanted.replace(storage=stored[1])
    tree = {"x": integers(8, 8, seed=0), "name": "constant", "b": [integers(8, 16, seed=1)]}
    first, second = Mesh(a=meshes[0], b=meshes[1]), Mesh(a=meshes[2], b=meshes[0])
    moved = fp.Sharded.of(tree, first, held).relayout(wanted, second)
    assert moved.mesh == second and moved.specs["b"] == [wanted]
    assert same(*({"x": t["x"], "b": t["b"]} for t in (moved.full(), tree))) and moved.full()["name"] == "constant"


def test_it_is_saved_copied_and_not_pickled(tmp_path: Path) -> None:
    tree = {"w": integers(8, 4, seed=0), "n": 3}
    held = fp.Sharded.of(tree, Mesh(data=4), {"w": P("data"), "n": P()})
    held.save(tmp_path, step=7, extra={"run": 1})
    fp.checkpoint.inspect(tmp_path).verify()
    assert fp.checkpoint.inspect(tmp_path).step == 7 and fp.checkpoint.load(tmp_path)["n"] == 3
    again = fp.Sharded.restore(tmp_path, Mesh(a=2), {"w": P(None, "a"), "n": P()})
    assert torch.equal(again.full()["w"], tree["w"]) and again.specs["w"] == P(None, "a")
    assert same(copy.deepcopy(held).full()["w"], tree["w"])
    with pytest.raises(TypeError, match=r"save it by x.save\(path\)"):
        pickle.dumps(held)
    assert repr(held) == "Sharded on Mesh(data=4)\n  n: 3, P()\n  w: (8, 4) float64, P('data')"


# --- of a training step ---

STEPS: dict[str, tuple[Any, Mesh]] = {
    "zero 3": (fp.zero(3, "data"), Mesh(data=4)),
    "flat": (fp.zero(2, "data", layout="flat"), Mesh(data=2)),
    "bf16": (fp.chain(fp.mixed_precision("bf16"), fp.zero(3, "data")), Mesh(data=2)),
    "pipeline": (fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2)), Mesh(pipe=2, data=2)),
    "stacks": (fp.pipeline("pipe", {"l": P("pipe"), "out": P()}, microbatches=2), Mesh(pipe=2)),
    "replicas": (fp.local_sgd("data", inner=2), Mesh(data=2)),
    "master": (fp.data_parallel("data", master=1), Mesh(data=4)),
}


def loss(params: Any, x: Tensor) -> Tensor:
    for w in params["l"].unbind(0):
        x = torch.tanh(x @ w)
    return (x @ params["out"]).square().mean()


def parameters() -> Any:
    generator = torch.Generator().manual_seed(0)
    return {"l": torch.randn(4, 6, 6, generator=generator), "out": torch.randn(6, 4, generator=generator)}


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def step_of(plan: str, optimizer: Any = None) -> Any:
    transform, mesh = STEPS[plan]
    return fp.train_step(loss, optimizer or fp.optim.ema(fp.optim.adamw(0.1), 0.9), mesh, transform)


def begun_from_sharded(pairs: list[tuple[str, str]]) -> list[bool]:
    """Whether a state that begins from the sharded parameters of another step is that from the full ones."""
    found = []
    for source, target in pairs:
        first, second = step_of(source, fp.optim.sgd(0.1)), step_of(target)
        state, _ = first(first.init(parameters()), X)
        params = first.sharded(state)[0]
        got, wanted = second.init(params, batch=X), second.init(params.full())
        found.append(
            same(second.whole(got), second.whole(wanted)) and torch.isfinite(second(got, X)[1].loss or X).all()
        )
    return found


@pytest.mark.parametrize("target", STEPS)
def test_a_step_begins_from_sharded_parameters(target: str) -> None:
    assert all(begun_from_sharded([("zero 3", target), ("stacks", target)]))


@pytest.mark.parametrize("plan", sorted({*STEPS} - {"replicas"}))
def test_frozen_parameters_do_not_change(plan: str) -> None:
    train = step_of(plan)
    state = train.init(parameters())
    frozen, (params, _), before = train.frozen(state), train.sharded(state), train.sharded(state)[0].full()
    state, _ = train(state, X)
    with pytest.raises(fp.DonatedStateError):
        params.full()
    assert same(frozen.full(), before) and not same(train.sharded(state)[0].full(), before)
    assert same(frozen.relayout(P(), Mesh(data=2)).full(), before)


def test_a_function_takes_frozen_parameters_and_leaves_the_state() -> None:
    train = step_of("zero 3")
    state = train.init(parameters())
    params, optimizer_state = train.sharded(state)
    mean = fp.compile(STEPS["zero 3"][0](loss), Mesh(data=4))
    assert torch.equal(mean(params, X), train.compile(STEPS["zero 3"][0](loss))(state, X))
    add = fp.compile(
        lambda x, s: (x.sum(), s), Mesh(data=4), in_specs=(P(), params.specs), out_specs=(P(), params.specs), state=1
    )
    add(X, params)  # a view of a training state is copied, not donated
    assert same(params.full(), parameters()) and "donated" not in repr(optimizer_state)


@pytest.mark.parametrize("plan", ["pipeline", "stacks"])
def test_parameters_on_the_stages_of_a_pipeline(plan: str) -> None:
    transform, mesh = STEPS[plan]
    train = step_of(plan)
    state = train.init(parameters(), batch=X)
    frozen, value = train.frozen(state), train.compile(transform(loss))(state, X)
    torch.testing.assert_close(fp.compile(transform(loss), mesh)(frozen, X), value)
    data = fp.compile(fp.data_parallel(mesh.axis_names[-1])(loss), mesh)
    with pytest.raises(SpecError, match=r"it lies on the stages of a pipeline .*, for loss it must lie on all ranks"):
        data(frozen, X)
    torch.testing.assert_close(data(frozen.relayout(P()), X), value)


# --- on processes ---


def on_a_rank(rank: int, folder: str) -> Any:
    found, cache = generated(fp.zero(3, "data"), Mesh(data=2))
    run, state, params = compiled(step, "zero 3"), begin(), {"w": integers(4, 4, seed=0)}
    held = fp.Sharded.of(params, Mesh(data=2), P("data"))
    for call in range(3):
        _, state = run(held, state, integers(4, 4, seed=call))
    held.save(folder)
    again = fp.Sharded.restore(folder, Mesh(data=2), P(None, "data"))
    moved = held.relayout(P(None, "data"))
    shards = held.handles[0].shape, moved.handles[0].shape, again.handles[0].shape
    results = moved.full()["w"], again.full()["w"], state.full()
    return found, cache.full(), shards, results, begun_from_sharded([("flat", "bf16"), ("stacks", "flat")])


def test_on_processes(tmp_path: Path) -> None:
    wanted, cache = generated(fp.data_parallel("data"), Mesh(data=1))
    params, state = {"w": integers(4, 4, seed=0)}, begin()
    for call in range(3):
        _, state = step(params, state, integers(4, 4, seed=call))
    for found, whole, shards, (moved, again, after), begun in run_on_processes(on_a_rank, 2, str(tmp_path)):
        assert same(found, wanted) and same(whole, cache.full())
        assert shards == ((2, 4), (4, 2), (4, 2))
        assert torch.equal(moved, params["w"]) and torch.equal(again, params["w"]) and same(after, state)
        assert begun == [True, True]


def test_a_function_makes_its_first_state_on_the_ranks() -> None:
    def begin_cache(weights: Tensor, state: Any, x: Tensor) -> Any:
        return x.sum(), {
            "rows": torch.nn.functional.pad((x @ weights)[:, None], (0, 0, 2, 0)),
            "step": 3,
            "at": x[:, 0],
        }

    plan, mesh = fp.zero(3, "data"), Mesh(data=2)
    weights, x = integers(4, 2, seed=0), integers(4, 4, seed=1)
    run = fp.compile(plan(begin_cache), mesh, state=1)
    shapes, specs = run.new_state(weights, None, x)
    assert specs == {"rows": P("data"), "step": P(), "at": P("data")}
    assert (shapes["rows"].shape, shapes["step"], shapes["rows"].device.type) == ((4, 3, 2), 3, "cpu")
    total, state = run(weights, None, x)
    wanted = begin_cache(weights, None, x)[1]
    assert torch.equal(total, x.sum()) and same({**state.full(), "step": 0}["rows"], wanted["rows"])
    assert state.full()["step"] == 3 and [shard.shape[0] for shard in state.handles[1]] == [2, 2]
    step = fp.compile(fp.data_parallel("data")(lambda w, s, x: cached(w, s["rows"], x)[0]), mesh)
    assert torch.equal(step(weights, state, x), cached(weights, wanted["rows"], x)[0])


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("data", [1, 2])
def test_a_pipeline_keeps_the_state_of_its_stages(data: int, microbatches: int) -> None:
    """A cache of two layers, of which each stage writes rows in place."""

    def step(params: Any, state: Any, x: Tensor, at: Tensor) -> Any:
        new = []
        for weight, held in zip(params, state, strict=True):
            held = held.index_copy(1, at, (x @ weight)[:, None])
            x = held.sum(1)
            new.append(held)
        return x, new

    mesh = Mesh(data=data, pipe=2)
    batch = (P("data"), P("data"), P())
    cut = tuple(P("microbatch") if spec != P() else P() for spec in batch)
    pipeline = fp.pipeline("pipe", microbatches=microbatches, balance="layers", batch=cut)
    plan = fp.chain(fp.data_parallel("data", batch=batch), pipeline)
    run = fp.compile(plan(step), mesh, state=1)
    params = [integers(2, 2, seed=index) for index in range(2)]
    state: Any = [torch.zeros(4, 3, 2).double() for _ in params]
    weights, held, places = run.hold(params, state, integers(4, 2, seed=0), torch.tensor([0])), state, []
    for call in range(4):
        x, at = integers(4, 2, seed=call), torch.tensor([call % 3])
        expected, state = step(params, state, x, at)
        found, held = run(weights, held, x, at)
        assert torch.equal(found, expected) and same(held.full(), state)
        assert [handle.holders for handle in held.handles] == [{0}, {1}]
        places.append([handle.parts[rank][0].data_ptr() for rank, handle in enumerate(held.handles)])
    assert places[1] == places[2] == places[3], "rows are written in place"
    assert all("cat" not in line or "f64[2, 3" not in line for line in run.program.lines())
