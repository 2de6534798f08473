"""Examples of reinforcement learning: the functions on any mesh, and the runs on several meshes."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P, split

from .processes import run_on_processes

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module", autouse=True)
def modules() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))
    for name in ("rlhf", "gpt", "reporting"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, for what holds without training it to an end."""
    import gpt
    import rlhf

    monkeypatch.setattr(rlhf, "CONFIG", gpt.Config(layers=1, embed=32, heads=4, vocab=16))


def run(script: str, *options: str, folder: Path) -> str:
    """What an example prints, in float64."""
    with pytest.MonkeyPatch.context() as patch:
        said = list[str]()
        patch.setattr(sys, "argv", [script, "--double", "--plot", str(folder / "plot.png"), *options])
        patch.setattr("builtins.print", lambda *words, **_: said.append(" ".join(map(str, words))))
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return "\n".join(said)


def rewards(text: str) -> list[str]:
    return re.findall(r"\d+: reward (\S+),", text)


def held_out(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"held out, \w+: reward (\S+)", text)]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(2, 5), st.integers(0, 99))
def test_advantages_of_groups_are_white_on_any_mesh(ranks: int, prompts: int, group: int, seed: int) -> None:
    import rlhf

    scores, f = drawn(seed, ranks * prompts * group), partial(rlhf.group_advantage, group=group)
    found = fp.compile(fp.partition(f, "data", P("data"), P("data")), Mesh(data=ranks))(scores)
    by_prompt, spread = found.reshape(-1, group), scores.reshape(-1, group).std(1)
    assert torch.allclose(found, f(scores), rtol=1e-12)
    assert by_prompt.mean(1).abs().max() < 1e-12
    assert torch.allclose(by_prompt.std(1), spread / (spread + 1e-4), rtol=1e-9)  # 1, if no scores are close


@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.floats(0, 1), st.integers(0, 99))
def test_general_advantages_are_their_sums_of_errors(ranks: int, rows: int, beta: float, seed: int) -> None:
    """The advantage of a token is the discounted sum of the errors of the critic from there on."""
    import rlhf

    names = ("old", "reference", "values")
    batch = {name: drawn(seed + index, ranks * rows, rlhf.ANSWER) for index, name in enumerate(names)}
    batch["scores"] = drawn(seed + 9, ranks * rows)
    f = fp.partition(partial(rlhf.general_advantage, beta=beta), "data", (P("data"),), P("data"))
    found = fp.compile(f, Mesh(data=ranks))(batch)
    rewards = -beta * (batch["old"] - batch["reference"])
    rewards[:, -1] += batch["scores"]
    following = torch.cat([batch["values"][:, 1:], torch.zeros(ranks * rows, 1, dtype=torch.float64)], 1)
    errors = rewards + following - batch["values"]
    powers = 0.95 ** torch.arange(rlhf.ANSWER, dtype=torch.float64)
    sums = torch.stack([(errors[:, t:] * powers[: rlhf.ANSWER - t]).sum(1) for t in range(rlhf.ANSWER)], 1)
    assert torch.allclose(found["returns"], sums + batch["values"], atol=1e-12)
    assert torch.allclose(found["advantage"], rlhf.whitened(sums), atol=1e-9)


def test_the_reward_model_scores_as_the_rule() -> None:
    import rlhf

    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(0, 16, (32, 8), generator=torch.Generator().manual_seed(0))
    tokens[:8] = (tokens[:8, :1] + torch.arange(8)) % 10
    tokens[:8, 1:] = (tokens[:8, 1:2] + torch.arange(7)) % 10
    table = {"table": rlhf.reward_table(16)}
    digits = tokens.clamp(max=9)
    assert torch.equal(rlhf.reward(table, digits), rlhf.score(digits)) and rlhf.score(digits).max() == 1


def test_a_reward_that_is_not_finite() -> None:
    import rlhf

    with pytest.raises(ValueError, match=r"2 of 3 rewards are not finite \(sample 1: nan, 2: inf\)"):
        rlhf.finite(torch.tensor([0.0, float("nan"), float("inf")]))


@pytest.mark.usefixtures("one_layer")
def test_a_run_refuses_such_a_reward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import rlhf

    def reward(tokens: torch.Tensor) -> torch.Tensor:
        return torch.full((len(tokens),), float("inf"))

    with pytest.raises(ValueError, match=r"1 sample of each prompt: .* draw at least 2"):
        rlhf.group_advantage(torch.zeros(4), 1)
    monkeypatch.setattr(rlhf, "score", reward)
    with pytest.raises(ValueError, match="128 of 128 rewards are not finite"):
        run("grpo.py", "--mesh", "data=1", "--steps", "1", folder=tmp_path)


def test_a_preference_lowers_the_loss_of_its_side() -> None:
    import rlhf

    new = torch.zeros(4, 6, dtype=torch.float64, requires_grad=True)
    rlhf.preference_loss(new, {"reference": torch.zeros(4, 6, dtype=torch.float64)}).backward()
    assert new.grad is not None and (new.grad[0::2] < 0).all() and (new.grad[1::2] > 0).all()


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize("script", ["grpo.py", pytest.param("ppo.py", marks=pytest.mark.slow)])
def test_the_first_ratio_is_one_and_rewards_are_equal_on_meshes(script: str, tmp_path: Path) -> None:
    options = ("--steps", "2", "--updates", "1")
    texts = [
        run(script, "--mesh", mesh, "--zero", stage, *options, folder=tmp_path)
        for mesh, stage in (("data=2,tensor=2", "1"), ("data=4", "3"))
    ]
    assert rewards(texts[0]) == rewards(texts[1]) and len(rewards(texts[0])) == 2
    assert all("0: reward" in text and "|ratio − 1| 0.0e+00, divergence 0.0000" in text for text in texts)


@pytest.mark.slow
def test_samples_on_another_mesh_are_the_same(tmp_path: Path) -> None:
    options = ("--steps", "2", "--mesh", "data=2,tensor=2")
    other = run("grpo.py", *options, "--sample-mesh", "data=1,tensor=4", folder=tmp_path)
    assert rewards(run("grpo.py", *options, folder=tmp_path)) == rewards(other)


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize("script", [pytest.param("grpo.py", marks=pytest.mark.slow), "ppo.py"])
def test_a_run_goes_on_from_its_checkpoints(script: str, tmp_path: Path) -> None:
    """All models are saved: the curve is that of one run."""
    mesh = ("--mesh", "data=2")
    whole = run(script, *mesh, "--steps", "2", folder=tmp_path)
    saved = (*mesh, "--save", str(tmp_path / "saved"))
    parts = [run(script, *saved, "--steps", steps, folder=tmp_path) for steps in ("1", "2")]
    lines = [re.findall(r"^\d+: .*", text, re.MULTILINE) for text in (whole, *parts)]
    assert len(lines[0]) == 2 and lines[0] == lines[1] + lines[2]


@pytest.mark.usefixtures("one_layer")
def test_parameters_move_to_the_layout_of_generation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six tokens cost one move, of what a rank lacks: three quarters under ZeRO-3."""
    import gpt
    import rlhf

    from functional_parallel.stateful import HeldLeaves

    sent, fill = list[int](), HeldLeaves.fill

    def counted(self: HeldLeaves, *args: Any) -> None:
        fill(self, *args)
        sent.append(self.sent)

    mesh = Mesh(data=4)
    params, specs = split(gpt.init(rlhf.CONFIG))
    plan = rlhf.plan_of(specs, mesh, 3)
    train = fp.train_step(lambda p, tokens: -rlhf.log_probs(p, tokens).mean(), fp.optim.sgd(0.1), mesh, plan)
    state, sample = train.init(params), rlhf.Sampler(mesh, specs)
    monkeypatch.setattr(HeldLeaves, "fill", counted)
    assert sample(state, rlhf.prompts(8, 0), 0).shape == (8, 8)
    layout = train.sharded(state)[0]
    leaves = zip(optree.tree_leaves(layout.shapes), optree.tree_leaves(layout.specs), strict=True)
    assert sent == [sum(3 * x.nbytes // 4 for x, spec in leaves if spec.axes)]


ACTOR, OTHERS = Mesh(data=2, ranks=[0, 1]), Mesh(data=2, ranks=[2, 3])


def losses_on(rank: int, actor: Mesh, others: Mesh) -> list[list[float]]:
    """Two updates of an actor on one mesh, with a reference on another one. Values move between them as trees do."""
    sys.path.insert(0, str(EXAMPLES))
    import gpt
    import rlhf

    torch.set_default_dtype(torch.float64)
    rlhf.CONFIG = gpt.Config(layers=1, embed=32, heads=4, vocab=16)
    params, specs = split(gpt.init(rlhf.CONFIG))
    params, plan = rlhf.in_default_dtype(params), rlhf.plan_of(specs, actor)

    def loss(params: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        new = rlhf.log_probs(params, batch["tokens"])
        divergence = rlhf.divergence(new, batch["reference"])
        return rlhf.policy_loss(new, batch) + divergence, divergence

    train = fp.train_step(loss, fp.optim.adamw(3e-3), actor, plan, has_aux=True)
    of_policy, of_reference = train.compile(plan(rlhf.log_probs)), fp.compile(plan(rlhf.log_probs), others)
    state, found, sample = train.init(params), list[list[float]](), rlhf.Sampler(actor, specs)
    reference = fp.Sharded.of(params, actor, P()).relayout(P(), others)
    for step in range(2):
        tokens, known = torch.zeros(16, 8, dtype=torch.int64), torch.zeros(16, 6)
        if rank in actor.processes:
            tokens = sample(state, rlhf.prompts(16, step), step)
        moved = fp.Sharded.of(tokens, actor, P("data")).relayout(P("data"), others)
        if rank in others.processes:
            known = of_reference(reference, moved.full())
        judged = fp.Sharded.of(known, others, P("data")).relayout(P("data"), actor)
        if rank in actor.processes:
            batch = {"tokens": tokens, "old": of_policy(state, tokens), "reference": judged.full()}
            state, metrics = train(state, batch | {"advantage": rlhf.whitened(rlhf.score(tokens))[:, None]})
            found.append([float(metrics.loss), float(metrics.aux)])
    return found


@pytest.mark.slow
def test_the_actor_and_the_reference_on_parts_of_the_ranks() -> None:
    """The actor is on processes 0 and 1, the reference on 2 and 3: the losses are those of one mesh, to the bit."""
    both = Mesh(data=2)
    wanted = losses_on(0, both, both)
    assert wanted[0][1] == 0 < wanted[1][1]
    assert run_on_processes(losses_on, 4, ACTOR, OTHERS) == [wanted, wanted, [], []]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["grpo.py", "ppo.py"])
def test_rewards_rise(script: str, tmp_path: Path) -> None:
    """60 rewards are equal on three meshes, and answers to prompts that were never trained on improve too."""
    meshes = (("data=2,tensor=2", "1"), ("data=1", "0"), ("data=4", "3"))
    texts = [run(script, "--mesh", mesh, "--zero", stage, folder=tmp_path) for mesh, stage in meshes]
    assert rewards(texts[0]) == rewards(texts[1]) == rewards(texts[2]) and len(rewards(texts[0])) == 60
    assert float(rewards(texts[0])[-1]) > 0.9
    before, after = held_out(texts[0])
    assert after > 0.8 > 0.2 > before
    assert max(map(float, re.findall(r"divergence (\S+?)[,\n]", texts[0] + "\n"))) < 6


@pytest.mark.slow
def test_without_updates_nothing_rises(tmp_path: Path) -> None:
    text = run("grpo.py", "--mesh", "data=1", "--updates", "0", "--steps", "20", folder=tmp_path)
    found = [float(each) for each in re.findall(r"\d+: reward (\S+)", text)]
    assert len(found) == 20 and max(found) < 0.2
    before, after = held_out(text)
    assert before == after


@pytest.mark.slow
def test_dpo_prefers_better_answers(tmp_path: Path) -> None:
    before, after = held_out(run("grpo.py", "--mesh", "data=2", "--loss", "dpo", folder=tmp_path))
    assert after > before + 0.3
