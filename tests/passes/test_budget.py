"""Rematerialisation within a budget: the same values, a peak that fits, no more work than needed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.passes import Phase, ProgramPass, Unit
from functional_parallel.passes.choice_costs import ChoiceCosts
from functional_parallel.passes.residual_choices import ResidualChoices
from functional_parallel.program.memory import memory_of
from functional_parallel.program.work import recompute_cost
from functional_parallel.requests import RunPass
from sharding_specs import Mesh, split

from ..processes import run_on_processes
from ..program.test_memory import gpt, measured
from .networks import SPLIT, batch, integer_loss, loss, noisy_loss, parameters

PLANS = {
    "data": (fp.data_parallel("data"),),
    "zero 1": (fp.zero(1, "data"),),
    "zero 3": (fp.zero(3, "data"),),
    "zero 3, kept": (fp.zero(3, "data", keep_gathered=True),),
    "zero 3, ahead": (fp.zero(3, "data", prefetch=3),),
    "tensor": (fp.tensor_parallel("tensor", SPLIT), fp.zero(2, "data")),
    "microbatches": (fp.zero(2, "data"), fp.accumulate(2)),
    "all": (fp.tensor_parallel("tensor", SPLIT), fp.zero(3, "data"), fp.accumulate(2, reduce="each")),
}


def plan_of(name: str, *first: Any) -> tuple[Any, Mesh]:
    parts = PLANS[name]
    sizes = {"data": 2, "tensor": 2} if any(part.axis == "tensor" for part in parts) else {"data": 4}
    return fp.chain(*first, *parts), Mesh(**sizes)


def step(name: str, *first: Any, f: Any = loss, layers: int = 2, rows: int = 1024, **options: Any) -> Any:
    plan, mesh = plan_of(name, *first)
    train = fp.train_step(f, fp.optim.adamw(1e-2), mesh, plan, **options)
    return train.lower(train.init(parameters(layers)), *batch(rows))


@cache
def plain(name: str, bucket: int | None = 25 << 20) -> Any:
    return step(name, bucket=bucket)


def plain_peak(name: str, bucket: int | None = 25 << 20) -> int:
    return plain(name, bucket).memory().peak


@cache
def lowest(name: str, bucket: int | None = 25 << 20) -> int:
    """The lowest peak that is reached, as the error says."""
    with pytest.raises(fp.BudgetError) as caught:
        step(name, fp.remat(budget=1), bucket=bucket)
    return reached(caught.value)


def reached(error: fp.BudgetError) -> int:
    return int(str(error).split("reaches is ")[1].split()[0])


def again(program: Any) -> int:
    """The work of computing again, gathers of parameters apart: those are ZeRO-3's own."""
    copies = [node for node in program.traced.nodes if info(node).recomputed]
    return sum(recompute_cost(node, program.mesh) for node in copies if "all_gather" not in str(node.target))


@settings(max_examples=5)
@given(name=st.sampled_from(sorted(PLANS)), fraction=st.floats(0, 1), bucket=st.sampled_from([1 << 10, 25 << 20]))
def test_the_peak_fits_and_is_measured(name: str, fraction: float, bucket: int | None) -> None:
    low, high = lowest(name, bucket), plain_peak(name, bucket)
    budget = round(low + fraction * (high - low))
    program = step(name, fp.remat(budget=budget), bucket=bucket)
    assert measured(program) == program.memory().peak <= budget


@settings(max_examples=5)
@given(name=st.sampled_from(sorted(PLANS)), fraction=st.floats(0, 1), integers=st.booleans())
def test_gradients_are_the_same_to_the_bit(name: str, fraction: float, integers: bool) -> None:
    """Those of the same plan without recomputation; on integers also those of the whole function."""
    plan, mesh = plan_of(name)
    f, params, inputs = (
        integer_loss if integers else loss,
        parameters(2, integers=integers),
        batch(512, integers=integers),
    )

    def compiled(*first: Any) -> Any:
        return fp.compile(fp.grad_and_value(fp.chain(*first, plan)(f)), mesh)

    plain = compiled()
    high = plain.lower(params, *inputs).memory().peak
    with pytest.raises(fp.BudgetError) as caught:
        compiled(fp.remat(budget=1))(params, *inputs)
    low = reached(caught.value)
    chosen = compiled(fp.remat(budget=round(low + fraction * (high - low))))
    found = chosen(params, *inputs)
    assert chosen.program.memory().peak <= round(low + fraction * (high - low))
    assert all(optree.tree_leaves(optree.tree_map(torch.equal, found, plain(params, *inputs))))
    if integers:
        whole = fp.grad_and_value(f)(params, *inputs)
        assert all(optree.tree_leaves(optree.tree_map(torch.equal, found, whole)))


@pytest.mark.parametrize("name", sorted(PLANS))
@pytest.mark.every(3)
def test_a_looser_budget_never_computes_more_again(name: str) -> None:
    low, high = lowest(name), plain_peak(name)
    budgets = [low + (high - low) * part // 3 for part in range(4)]
    programs = [step(name, fp.remat(budget=budget)) for budget in budgets]
    costs = [again(program) for program in programs]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 0
    assert programs[-1].fingerprint() == plain(name).fingerprint()  # a budget that is kept anyway changes nothing
    copies = [{str(node) for node in p.traced.nodes if info(node).recomputed} for p in programs]
    assert [len(names) for names in copies] == sorted(map(len, copies), reverse=True)


@pytest.mark.parametrize("name", ["data", "zero 3", "microbatches"])
@pytest.mark.every(2)
def test_no_named_policy_fits_with_less_work(name: str) -> None:
    wide = partial(step, name, layers=6, rows=2048)
    for policy in (fp.remat(), fp.remat(every=2), fp.remat(every=3), fp.remat("nothing")):
        by_name = wide(policy)
        auto = wide(fp.remat(budget=by_name.memory().peak))
        assert auto.memory().peak <= by_name.memory().peak
        assert again(auto) <= again(by_name), policy


@dataclass(frozen=True)
class Compare(ProgramPass):
    """A pass that holds every rung's expected peak against that of the program rewritten so."""

    name: ClassVar[str] = "compare"
    phase: ClassVar[Phase] = Phase.RECOMPUTE
    found: list[tuple[int, int]] = field(default_factory=list, hash=False)

    def rewrite(self, unit: Unit) -> None:
        program = unit.program
        finished, copies = program.copy()
        unit.rest(finished)
        costs = ChoiceCosts(program.mesh, None, ())
        choices, ways = ResidualChoices(program.traced, finished.traced, copies, "*", costs), {}
        for rung in choices.rungs(()):
            ways |= dict([rung.choice] if rung.choice else [])
            trial, copies = program.copy()
            choices.apply(trial.traced, ways, copies)
            trial.traced.seal()
            unit.rest(trial)
            self.found.append((rung.peak, memory_of("", trial.traced).peak))


@pytest.mark.parametrize("name", sorted(PLANS))
def test_the_ladder_foresees_every_peak(name: str) -> None:
    """The curve found without rewriting is that of the rewritten program, to the byte; ZeRO-3 moves gathers."""
    compare, (plan, mesh) = Compare(), plan_of(name)
    fp.compile(fp.grad_and_value(plan(loss).requesting(RunPass(compare))), mesh).lower(parameters(4), *batch(1024))
    assert len(compare.found) > 3
    for expected, exact in compare.found:
        assert abs(expected - exact) <= (0.02 * exact if "zero 3" in name else 0)


def gpt_step(*first: Any, embed: int = 16) -> tuple[Any, list[torch.Tensor]]:
    """One step of a small GPT in bfloat16 under four transforms: its program, and all that comes of it."""
    config = gpt.Config(layers=2, embed=embed, heads=2, time=16, sequence_parallel=True)
    params, specs = split(gpt.init(config))
    tokens = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(0))
    rest = (fp.tensor_parallel("tensor", specs), fp.zero(3, "data"), fp.accumulate(2))
    plan = fp.chain(fp.mixed_precision("bf16"), *first, *rest)
    mesh = Mesh(data=2, tensor=2)
    train = fp.train_step(partial(gpt.loss, config=config), fp.optim.sgd(0.1), mesh, plan, clip=1.0)
    state, metrics = train(train.init(params), tokens)
    return train.program, [*optree.tree_leaves(train.params(state)), metrics.loss, metrics.grad_norm]


def test_attention_and_mixed_precision_on_a_gpt() -> None:
    plain, before = gpt_step()
    budget = plain.memory().peak * 92 // 100
    chosen, after = gpt_step(fp.remat(budget=budget))
    assert measured(chosen) == chosen.memory().peak <= budget < plain.memory().peak
    assert all(map(torch.equal, before, after))
    assert again(chosen) > 0
    assert plain.counts()["psum_scatter", ("tensor",)] == chosen.counts()["psum_scatter", ("tensor",)]  # dear: last


def test_cheap_ops_come_first() -> None:
    """Where they are not computed again anyway."""
    config = gpt.Config(layers=2, embed=64, heads=2, time=32)
    params, _ = split(gpt.init(config))
    tokens = torch.zeros(16, 33, dtype=torch.int64)

    def program(plan: Any) -> Any:
        f = fp.grad_and_value(plan(partial(gpt.loss, config=config)))
        return fp.compile(f, Mesh(), without=("cheap ops again",)).lower(params, tokens)

    plain, names = program(fp.remat(where="none")).memory().peak, []
    for part in (90, 70, 60):
        twice = [node for node in program(fp.remat(budget=plain * part // 100)).traced.nodes if info(node).recomputed]
        names.append({str(node.target).removeprefix("aten.").removesuffix(".default") for node in twice})
    assert "gelu" in names[0] and "native_layer_norm" in names[1]
    assert not (names[0] | names[1]) & {"mm", "bmm"}
    assert names[2] & {"mm", "bmm"}


def trained_on_rank(rank: int, budget: int) -> tuple[list[torch.Tensor], int, str]:
    """Two steps of AdamW under a plan with a budget: what comes of it, what is computed again, the program."""
    plan, mesh = plan_of("tensor", *([fp.remat(budget=budget)] if budget else []))
    train = fp.train_step(noisy_loss, fp.optim.adamw(1e-2), mesh, plan, seed=0, reduction="ordered")
    state = train.init(parameters(2))
    for number in range(2):
        state, metrics = train(state, *(leaf.roll(number, 0) for leaf in batch(512)))
    return [*optree.tree_leaves(train.params(state)), metrics.loss], again(train.program), train.program.fingerprint()


def test_on_real_processes() -> None:
    """Every rank chooses the same, and gets the bits of simulated ranks without recomputation."""
    plain, none, _ = trained_on_rank(0, 0)
    high = step("tensor", f=noisy_loss, rows=512, seed=0).memory().peak
    budget = high * 9 // 10
    _, more, fingerprint = trained_on_rank(0, budget)
    assert more > none == 0
    for found, *chosen in run_on_processes(trained_on_rank, 4, budget):
        assert all(map(torch.equal, found, plain))
        assert chosen == [more, fingerprint]


def test_dropout_repeats_itself() -> None:
    params, inputs = parameters(3), batch(512)

    def trained(plan: Any) -> tuple[Any, torch.Tensor]:
        train = fp.train_step(noisy_loss, fp.optim.sgd(0.1), Mesh(), plan, seed=1)
        return train, train.params(train(train.init(params), *inputs)[0])["layers"][0]["a"]

    train, plain = trained(None)
    train, found = trained(fp.remat(budget=train.program.memory().peak * 4 // 5))
    assert again(train.program) > 0
    assert torch.equal(found, plain)


def without_layers(kind: str) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "products":

        def f(params: Any, x: torch.Tensor) -> torch.Tensor:
            for weight in params.values():
                x = torch.exp(torch.sin(torch.tanh(x @ weight)))
            return x.sum()

        return f, {name: torch.randn(8, 8) for name in "abcdefgh"}, torch.randn(256, 8)
    block = (torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.GELU(), torch.nn.GroupNorm(2, 4))
    fn, params = fp.functional(torch.nn.Sequential(*block, *block, *block))
    return lambda params, x: fn(params, x).square().mean(), params, torch.randn(8, 4, 16, 16)


@pytest.mark.parametrize("kind", ["products", "convolutions"])
def test_a_function_without_layers(kind: str) -> None:
    """Every parameter is a layer then; what is cheap between products goes first."""
    f, params, x = without_layers(kind)
    plain = fp.compile(fp.grad(fp.remat(where="none")(f)), Mesh())
    before = plain(params, x)
    budget = plain.program.memory().peak * 3 // 4
    chosen = fp.compile(fp.grad(fp.remat(budget=budget)(f)), Mesh())
    assert all(optree.tree_leaves(optree.tree_map(torch.equal, before, chosen(params, x))))
    assert chosen.program.memory().peak <= budget
    again = [str(node.target) for node in chosen.program.traced.nodes if info(node).recomputed]
    assert not any("convolution" in name for name in again)


def test_where_restricts_the_choice() -> None:
    budget = (lowest("data") + plain_peak("data")) // 2
    program = step("data", fp.remat(budget=budget, where="layers/*"))
    names = {info(node).source.function for node in program.traced.nodes if info(node).recomputed}
    assert names == {"hidden"}  # nothing of the head
    with pytest.raises(fp.BudgetError):
        step("data", fp.remat(budget=budget, where="none"))


def test_it_can_be_switched_off_and_says_what_it_did() -> None:
    budget = (lowest("data") + plain_peak("data")) // 2
    program = step("data", fp.remat(budget=budget))
    assert "remat" in program.passes
    assert f"remat(budget={budget}): at most " in str(program.explain())
    assert "\n  computed again: " in str(program.explain())
    roomy = step("data", fp.remat(budget="1 TB"))
    assert "every residual is saved" in roomy.notes[0]
    f = fp.grad_and_value(fp.chain(fp.remat(budget=1), fp.data_parallel("data"))(loss))
    off = fp.compile(f, Mesh(data=2), without=("remat",)).lower(parameters(2), *batch(8))
    assert off.notes == ()
    assert "remat" not in off.passes


def biased(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Its layers begin with a sum, so the derivatives of a layer do not read what the layer before hands on."""
    for layer in params["layers"]:
        x = torch.sin(torch.tanh(x + layer["b"][0]) @ layer["a"]) @ layer["b"]
    return torch.nn.functional.cross_entropy(x @ params["head"], y)


@pytest.mark.parametrize(
    ("f", "layers", "said"),
    [
        (loss, 6, "7 values of 192.0 KiB in 5 layers, 6.68 Mflop"),
        (biased, 10, "20 values of 624.0 KiB in 10 layers, 9.91 Mflop"),
    ],
)
def test_the_note_says_what_is_computed_again_in_how_many_layers(f: Any, layers: int, said: str) -> None:
    with pytest.raises(fp.BudgetError) as caught:
        step("data", fp.remat(budget=1), f=f, layers=layers)
    program = step("data", fp.remat(budget=reached(caught.value)), f=f, layers=layers)
    assert f"\n  computed again: {said}\n" in program.notes[0]


def test_the_lowest_peak_is_that_of_a_choice_that_was_tried() -> None:
    """The last rung of the ladder of this model has a higher peak than one below it."""
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 96, "n_positions": 64, "n_embd": 64, "n_layer": 3, "n_head": 4}
    fn, params = fp.functional(transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).train())
    tokens = torch.zeros(8, 32, dtype=torch.long)

    def peak(budget: int) -> int:
        plan = fp.chain(fp.remat(budget=budget), fp.data_parallel("data"))
        f = lambda params, x: fn(params, input_ids=x, labels=x).loss  # noqa: E731
        train = fp.train_step(f, fp.optim.adamw(1e-2), Mesh(data=1), plan, clip=1.0, seed=3)
        peak: int = train.lower(params, tokens).memory().peak
        return peak

    with pytest.raises(fp.BudgetError) as caught:
        peak(1)
    low = reached(caught.value)
    assert peak(low) == low
    with pytest.raises(fp.BudgetError, match=f"reaches is {low} bytes"):
        peak(low - 1)


def test_a_budget_out_of_reach() -> None:
    with pytest.raises(fp.BudgetError) as caught:
        step("data", fp.remat(budget="1 KiB"))
    said = str(caught.value)
    assert "remat(budget=1024): the lowest peak that a choice reaches is" in said
    assert f"without it, {fp.program.explain.readable_bytes(plain_peak('data'))}" in said
    assert "parameters" in said and "a smaller batch" in said
    low = lowest("data")
    assert f"a budget of {low}" in said
    assert step("data", fp.remat(budget=low)).memory().peak <= low  # the budget that the error offers is kept


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"budget": 0}, "is no size"),
        ({"budget": -5}, "is no size"),
        ({"budget": True}, "is no size"),
        ({"budget": 1.5}, "is no size"),
        ({"budget": "8 gigs"}, "is no size.*'8GiB'"),
        ({"budget": "GiB"}, "is no size"),
        ({"budget": "0.1"}, "is no size"),
        ({"policy": "auto"}, "'auto' needs a budget"),
        ({"policy": "layers", "budget": 1}, "a budget is for 'auto', not 'layers'"),
        ({"budget": 1, "every": 2}, "every=2.* is for the policy 'layers', not 'auto'"),
        ({"policy": "attention", "every": 2}, "is for the policy 'layers', not 'attention'"),
    ],
)
def test_bad_input(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fp.remat(**wrong)
