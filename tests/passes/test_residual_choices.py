"""One choice per residual: the best of all on small programs, the bits of the plan without, peaks as predicted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import optree
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import functional_parallel as fp
from functional_parallel.ir import forward_nodes, update_info
from functional_parallel.passes import Phase, ProgramPass, Unit
from functional_parallel.passes.choice_costs import ChoiceCosts
from functional_parallel.passes.recompute import insert_recompute
from functional_parallel.passes.residual_choices import ResidualChoices
from functional_parallel.passes.stored_residuals import StoredResiduals
from functional_parallel.program import Hardware, Line, Program, memories_of, seconds_of
from functional_parallel.requests import RunPass
from sharding_specs import Mesh

from ..laws.test_offload import measured, predicted

MESH = Mesh(tensor=2)
MOVE = fp.offload(activations="host", at_least=1)
SPLIT = fp.partition_activations("tensor", at_least=1)
SPLIT_AND_MOVE = fp.partition_activations("tensor", memory="host", at_least=1)
ALLOWED = {
    "recomputation": (),
    "moves": (MOVE,),
    "shards": (SPLIT,),
    "shards on the host": (SPLIT_AND_MOVE,),
    "moves and shards": (SPLIT, MOVE),
}
OPS = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "double": lambda x: x + x,
    "swap": lambda x: x.mT.mT,
}


def machine(link: float, wire: float, flops: float) -> Hardware:
    return Hardware(
        "a machine",
        {torch.float64: flops},
        bandwidth=1e9,
        capacity=1 << 30,
        ranks_per_host=8,
        inside=Line(1e-7, 1 / wire),
        between=Line(1e-7, 1 / wire),
        launch=1e-7,
        start=1e-7,
        host=Line(1e-7, 1 / link),
    )


machines = st.builds(machine, *[st.sampled_from([1e7, 1e8, 1e9])] * 3)


@st.composite
def functions(draw: Any) -> Any:
    """A few layers, each a product and some cheap ops, which may read results of the layers before."""
    layers = draw(
        st.lists(
            st.tuples(st.sampled_from([2, 4, 6]), st.lists(st.sampled_from(sorted(OPS)), max_size=2), st.booleans()),
            min_size=1,
            max_size=3,
        )
    )

    def loss(params: Any, x: Tensor) -> Tensor:
        for weights, (_, names, is_added) in zip(params["layers"], layers, strict=True):
            y = x @ weights["a"]
            for name in names:
                y = OPS[name](y)
            x = x + y @ weights["b"] if is_added else torch.sin(y) @ weights["b"]
        return x.square().sum()

    generator = torch.Generator().manual_seed(0)
    widths = [width for width, *_ in layers]
    params = [
        {name: torch.randn(*shape, generator=generator).double() for name, shape in {"a": (4, n), "b": (n, 4)}.items()}
        for n in widths
    ]
    return loss, {"layers": params}, torch.randn(32, 4, generator=generator).double()


def seconds(program: Program, hardware: Hardware) -> float:
    memories = memories_of(program.traced)
    return sum(seconds_of(node, program.mesh, hardware, memories) for node in program.traced.nodes)


@dataclass(frozen=True)
class TryAll(ProgramPass):
    """A pass that tries all choices: rewrites a copy of the program by each, and finds its peak and its time.

    A recomputed value is computed from those that are saved, moved or split, whatever is between them.
    """

    hardware: Hardware = field(hash=False)
    forms: Sequence[StoredResiduals]
    found: list[tuple[int, float]] = field(default_factory=list, hash=False)
    name: ClassVar[str] = "try all"
    phase: ClassVar[Phase] = Phase.CUT  # before all that recomputes

    def rewrite(self, unit: Unit) -> None:
        for node in forward_nodes(unit.program.traced):
            update_info(node, stored_by="")
        finished, copies = unit.program.copy()
        unit.rest(finished)
        costs = ChoiceCosts(unit.program.mesh, self.hardware, self.forms)
        choices = ResidualChoices(unit.program.traced, finished.traced, copies, "*", costs)
        assume(choices.count <= 300)
        values = [(each.node, ["save", "recompute", *each.ways[1:]]) for each in choices.residuals]
        for ways in itertools.product(*(ways for _, ways in values)):
            chosen = {node: way for (node, _), way in zip(values, ways, strict=True)}
            self.found.append(self._of(unit, chosen))
        least = seconds(finished, self.hardware)
        self.found[:] = [(peak, time - least) for peak, time in self.found]

    def _of(self, unit: Unit, chosen: dict[fx.Node, Any]) -> tuple[int, float]:
        trial, copies = unit.program.copy()
        kept = {node for node, way in chosen.items() if way != "recompute"}
        insert_recompute(
            trial.traced, {copies[node] for node in forward_nodes(unit.program.traced) if node not in kept}
        )
        for node, way in chosen.items():
            if way not in ("save", "recompute"):
                update_info(copies[node], stored_by=str(way.form))
        trial.traced.seal()
        unit.rest(trial)
        return trial.memory().peak, seconds(trial, self.hardware)


def program_of(f: Any, arguments: Any, *plan: Any, mesh: Mesh = MESH) -> Any:
    return fp.compile(fp.grad_and_value(fp.chain(*plan)(f)), mesh).lower(*arguments)


def budgets(peaks: Sequence[int]) -> Iterator[int]:
    low, high = min(peaks), max(peaks)
    yield from (low, low + (high - low) // 3, low + 2 * (high - low) // 3)


@settings(max_examples=3)
@given(functions(), machines, st.sampled_from(sorted(ALLOWED)))
def test_the_choice_is_the_best_of_all(function: Any, hardware: Hardware, allowed: str) -> None:
    (f, *arguments), forms = function, ALLOWED[allowed]
    local = fp.chain(fp.remat(where="none"), *forms)(f)
    requested = [each.run for each in local.applied.requests if isinstance(each, RunPass)]
    every = TryAll(hardware, tuple(each for each in requested if isinstance(each, StoredResiduals)))
    fp.compile(fp.grad(local.requesting(RunPass(every))), MESH).lower(*arguments)
    wanted = fp.compile(fp.grad(fp.remat(where="none")(f)), MESH)
    bits, plain = optree.tree_leaves(wanted(*arguments)), seconds(wanted.program, hardware)
    for budget in budgets([peak for peak, _ in every.found]):
        step = fp.compile(fp.grad(fp.chain(fp.remat(budget=budget, hardware=hardware), *forms)(f)), MESH)
        assert all(map(torch.equal, optree.tree_leaves(step(*arguments)), bits))
        assert measured(step.program) == predicted(step.program) and step.program.memory().peak <= budget
        least = min(time for peak, time in every.found if peak <= budget)
        assert seconds(step.program, hardware) - plain == pytest.approx(least, rel=1e-6, abs=1e-12)
    lowest = min(peak for peak, _ in every.found)
    with pytest.raises(fp.BudgetError, match=f"the lowest peak that a choice reaches is {lowest} bytes"):
        fp.compile(fp.grad(fp.chain(fp.remat(budget=lowest - 1, hardware=hardware), *forms)(f)), MESH).lower(*arguments)


def deep(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["a"]) @ layer["b"]
    return x.square().sum()


def arguments_of(layers: int, rows: int = 64) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {"layers": [{"a": drawn(4, 8), "b": drawn(8, 4)} for _ in range(layers)]}, drawn(rows, 4)


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        (machine(1e12, 1e6, 1e7), "offload(activations='host')"),
        (machine(1e6, 1e12, 1e7), "partition_activations('tensor')"),
        (machine(1e6, 1e6, 1e12), "computed again"),
    ],
)
def test_the_fastest_link_decides(hardware: Hardware, said: str) -> None:
    arguments = arguments_of(6)
    budget = program_of(deep, arguments, fp.remat(where="none")).memory().peak * 6 // 10
    program = program_of(deep, arguments, fp.remat(budget=budget, hardware=hardware), SPLIT, MOVE)
    kinds = {line.split(": ")[0].strip() for line in program.notes[0].splitlines()[1:-1]}
    assert said in kinds <= {said, "computed again"} and program.memory().peak <= budget
    assert bool(program.moves()) == ("host" in said)
    assert bool(program.counts()) == ("tensor" in said)


def test_a_budget_that_is_kept_anyway_moves_nothing() -> None:
    arguments = arguments_of(3)
    plain = program_of(deep, arguments, fp.remat(where="none"))
    roomy = program_of(deep, arguments, fp.remat(budget="1GiB"), SPLIT, MOVE)
    assert str(roomy) == str(plain)
    assert len(roomy.notes) == 1 and "every residual is saved" in roomy.notes[0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
@pytest.mark.every(3)
def test_in_a_pipeline(schedule: str) -> None:
    """Each rank fits, by moves and shards too. The bits are those of the whole function."""
    outer, mesh, arguments = (
        fp.pipeline("pipe", schedule=schedule, microbatches=4),
        Mesh(pipe=2, tensor=2),
        arguments_of(4, 256),
    )
    plain = program_of(deep, arguments, fp.remat(where="none"), outer, mesh=mesh)
    budget = plain.memory().peak * 7 // 10
    remat = fp.remat(budget=budget, hardware=machine(1e12, 1e6, 1e6))
    step = fp.compile(fp.grad_and_value(fp.chain(remat, SPLIT, MOVE, outer)(deep)), mesh)
    wanted = fp.compile(fp.grad_and_value(fp.chain(fp.remat(where="none"), outer)(deep)), mesh)
    assert all(map(torch.equal, optree.tree_leaves(step(*arguments)), optree.tree_leaves(wanted(*arguments))))
    assert step.program.bytes_moved() and "offload(activations='host'): " in step.program.notes[0]
    assert measured(step.program) == predicted(step.program)
    assert max(rank.peak for rank in step.program.memory().ranks) <= budget


def test_bad_input() -> None:
    share = fp.offload(activations="host", fraction=0.5)
    with pytest.raises(ValueError, match=r"the budget decides which activations move, so .* takes no fraction=0.5"):
        program_of(deep, arguments_of(2), fp.remat(budget=1), share)
    with pytest.raises(ValueError, match="no hardware is known as 'abacus'"):
        fp.remat(budget=1, hardware="abacus")
    with pytest.raises(ValueError, match="its times weigh choices, so it needs a budget too"):
        fp.remat(hardware="h100")


def test_a_recomputed_product_keeps_its_orientation() -> None:
    """Only its transpose is read, but a transposed product has other bits."""

    def loss(params: Any, x: Tensor) -> Tensor:
        for layer in params["layers"]:
            x = torch.sin(x @ layer["a"]) @ layer["b"]
        return x.square().sum()

    def is_saved(node: fx.Node) -> bool:
        return not ("mm" in str(node.target) and "sin" in str(node.args[0]))

    found, wanted = (
        fp.compile(fp.grad(remat(loss)), Mesh())(*arguments_of(3))
        for remat in (fp.remat(is_saved), fp.remat(where="none"))
    )
    assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(wanted)))
