"""A state moves in memory to the layout of another step, bit for bit, by as many bytes as must be sent."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.checkpoint import LeafLayout, MovePlan
from functional_parallel.training.moving import HeldState
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from ..some_cases import one_in

TENSOR = fp.tensor_parallel("tensor", {
    "layers/*/w1": P(None, "tensor"), "layers/*/b1": P("tensor"), "layers/*/w2": P("tensor"), "out": P(),
})  # fmt: skip
PLANS: dict[str, tuple[Any, Mesh]] = {
    "data": (fp.data_parallel("data"), Mesh(data=4)),
    "zero 1": (fp.zero(1, "data"), Mesh(data=4)),
    "flat": (fp.zero(2, "data", layout="flat"), Mesh(data=4)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=4)),
    "tensor, zero 3": (fp.chain(TENSOR, fp.zero(3, "data")), Mesh(data=2, tensor=2)),
    "pipeline, zero 1": (
        fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2)), Mesh(pipe=2, data=2),
    ),
    "bf16, zero 3": (fp.chain(fp.mixed_precision("bf16"), fp.zero(3, "data")), Mesh(tensor=1, data=4)),
    "master": (fp.data_parallel("data", master=1), Mesh(data=4)),
}  # fmt: skip


def parameters() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {"layers": [{"w1": drawn(6, 10), "b1": drawn(10), "w2": drawn(10, 6)} for _ in range(4)], "out": drawn(6, 5)}


def loss(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["w1"] + layer["b1"]) @ layer["w2"]
    return (x @ params["out"]).square().mean()


def batch() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


def step_of(plan: str) -> Any:
    transform, mesh = PLANS[plan]
    return fp.train_step(loss, fp.optim.adamw(1e-2), mesh, transform)


def moved(pairs: list[tuple[str, str]]) -> list[bool]:
    """Whether each state is the same after it was moved, and trains on."""
    found = []
    for source, target in pairs:
        first, second = step_of(source), step_of(target)
        state, _ = first(first.init(parameters()), batch())
        wanted, got = first.whole(state), second.load(state, batch=batch())
        same = optree.tree_leaves(optree.tree_map(torch.equal, wanted, second.whole(got)))
        _, metrics = second(got, batch())
        _, right = first(state, batch())
        found.append(all(same) and got.step == 1 and torch.allclose(metrics.loss.float(), right.loss.float(), rtol=0.1))
    return found


@one_in(6, source=PLANS, target=PLANS)
def test_between_any_two_plans(source: str, target: str) -> None:
    assert moved([(source, target)]) == [True]


PAIRS = [
    ("zero 1", "tensor, zero 3"),
    ("tensor, zero 3", "pipeline, zero 1"),
    ("pipeline, zero 1", "flat"),
    ("flat", "master"),
]


def on_processes(rank: int) -> list[bool]:
    return moved(PAIRS)


def test_on_processes() -> None:
    assert run_on_processes(on_processes, 4) == [[True] * len(PAIRS)] * 4


PARTIAL = Mesh(data=3, ranks=[0, 2, 3])


def with_one_process_less(rank: int) -> Any:
    """Train on four processes, then on three of them, and then on four."""
    first = step_of("zero 3")
    second = fp.train_step(loss, fp.optim.adamw(1e-2), PARTIAL, fp.zero(3, "data"))
    state, _ = first(first.init(parameters()), batch())
    state = second.load(state)
    if rank in PARTIAL.processes:
        state, _ = second(state, batch()[:6])
    else:
        with pytest.raises(fp.LaunchError, match=r"process 1 is not on Mesh\(data=3, ranks=\[0, 2, 3\]\)"):
            second(state, batch()[:6])
    state = first.load(state)
    return state.step, first.params(state)


def test_a_mesh_over_some_of_the_processes() -> None:
    found = run_on_processes(with_one_process_less, 4)
    first, whole = step_of("zero 3"), fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(data=1))
    state, _ = first(first.init(parameters()), batch())
    state, _ = whole(whole.load(state), batch()[:6])
    for step, params in found:
        assert step == 2
        same = optree.tree_map(lambda a, b: torch.allclose(a, b, atol=1e-6), params, whole.params(state))
        assert all(optree.tree_leaves(same))


def elements(leaf: LeafLayout, mesh: Mesh, process: int) -> Tensor:
    """Mask of the elements of a leaf that a process holds."""
    mask = torch.zeros(leaf.shape, dtype=torch.bool)
    if process in mesh.processes:
        for piece in leaf.pieces:
            for region in leaf.regions(piece, mesh, mesh.coordinates([*mesh.processes].index(process))):
                mask[region.box.slices] = True
    return mask


def plan_between(source: str, target: str) -> MovePlan:
    first, second = step_of(source), step_of(target)
    state, _ = first(first.init(parameters()), batch())
    held, wanted = HeldState(state, second.states.runtime()), HeldState(second.load(state), first.states.runtime())
    names = {(leaf.kind, leaf.key): leaf for leaf in held.plan.leaves}
    pairs = tuple((leaf, names[leaf.kind, leaf.key]) for leaf in wanted.plan.leaves)
    return MovePlan(pairs, held.plan.mesh, wanted.plan.mesh)


@one_in(6, source=PLANS, target=PLANS)
def test_a_process_receives_what_it_lacks_once(source: str, target: str) -> None:
    plan = plan_between(source, target)
    total = 0
    for process in range(4):
        moves = list(plan.into(process))
        for wanted, old in plan.leaves:
            mine = [move for move in moves if move.leaf == old]
            counts = torch.zeros(old.shape, dtype=torch.int64)
            for move in mine:
                counts[move.box.slices] += 1
            needed = elements(wanted, plan.mesh, process)
            lacking = needed & ~elements(old, plan.source, process)
            assert torch.equal(counts, needed.long())
            assert sum(move.nbytes for move in mine) == lacking.sum() * old.dtype.itemsize
        total += sum(move.nbytes for move in moves)
        others = [move for each in range(4) if each != process for move in plan.into(each) if move.sender == process]
        assert sorted(map(repr, plan.out_of(process))) == sorted(map(repr, others))
    assert total == sum(move.nbytes for part in plan.parts(100) for each in range(4) for move in part.into(each))


def test_refusals() -> None:
    step = step_of("zero 1")
    state = step.init(parameters())
    other = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2))
    with pytest.raises(ValueError, match=r"step 0 on Mesh\(data=4\) is not of this step's model and optimizer"):
        other.load(state)
    with pytest.raises(TypeError, match="has its optimizer state and its step; give it alone"):
        other.load(state, None, 3)
    step(state, batch())
    with pytest.raises(fp.DonatedStateError):
        step_of("zero 3").load(state)


def test_to_a_mesh_over_some_of_the_processes_and_back() -> None:
    """Process 1 is lost: the others train on, and later all of them again."""
    first = step_of("zero 3")
    second = fp.train_step(loss, fp.optim.adamw(1e-2), PARTIAL, fp.zero(3, "data"))
    state, _ = first(first.init(parameters()), batch())
    wanted, got = first.whole(state), second.load(state, batch=batch())
    back = first.load(got)
    for each in (second.whole(got), first.whole(back)):
        assert all(optree.tree_leaves(optree.tree_map(torch.equal, wanted, each)))
    plan = MovePlan(
        tuple(
            zip(
                HeldState(got, first.states.runtime()).plan.leaves,
                HeldState(state, second.states.runtime()).plan.leaves,
                strict=True,
            )
        ),
        first.mesh,
        second.mesh,
    )
    assert not [*plan.into(1)]
    assert {move.receiver for move in plan.out_of(1)} <= {0, 2, 3}
    for wanted_leaf, held in plan.leaves:
        for process in (0, 2, 3):
            lacking = elements(wanted_leaf, second.mesh, process) & ~elements(held, first.mesh, process)
            sent = sum(move.nbytes for move in plan.into(process) if move.leaf == held)
            assert sent == lacking.sum() * held.dtype.itemsize
