"""Cheap values are computed again for the backward: the same bits, never more memory, nothing sent or drawn twice."""

from __future__ import annotations

import importlib
from collections import Counter
from functools import partial
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.passes import cheap
from sharding_specs import Mesh, optional, split

from ..program.test_memory import gpt, measured

OFF = ("cheap ops again",)
WIDTH = 8
SPLIT = {
    optional("layers/*/a"): "inner outer/tensor",
    optional("layers/*/c"): "inner outer/tensor",
    optional("layers/*/b"): "inner/tensor outer",
}
KINDS = {  # and the parameters that they use
    **{"gelu": "ab", "gate": "abc", "norm": "abgh", "rms": "abg", "scale": "gh"},
    **{"cast": "ab", "dropout": "ab", "shared": "abg", "late": "ab"},
}
MESHES = {"data": Mesh(data=2), "tensor": Mesh(data=2, tensor=2)}


@pytest.fixture
def no_value_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cheap, "LEAST", 1)


@pytest.fixture
def of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished program forgets of which values its copies are."""
    lower = importlib.import_module("functional_parallel.lowering.lower")  # the package has a function of this name
    monkeypatch.setattr(lower, "forget_rewrites", lambda graph: None)


def parameters(kinds: list[str]) -> Any:
    generator = torch.Generator().manual_seed(len(kinds))
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    shapes = {"a": (WIDTH, 2 * WIDTH), "b": (2 * WIDTH, WIDTH), "c": (WIDTH, 2 * WIDTH), "g": (WIDTH,), "h": (WIDTH,)}
    layers = [{name: draw(*shape) / 4 for name, shape in shapes.items() if name in KINDS[kind]} for kind in kinds]
    return {"table": draw(5, WIDTH), "layers": layers}


def layer(kind: str, params: Any, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    if kind == "gelu":
        return x + F.gelu(x @ params["a"]) @ params["b"]
    if kind == "gate":
        return x + (F.silu(x @ params["a"]) * (x @ params["c"])) @ params["b"]
    if kind == "norm":
        return x + F.gelu(F.layer_norm(x, (WIDTH,), params["g"], params["h"]) @ params["a"]) @ params["b"]
    if kind == "rms":
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * params["g"]
        return x + F.silu(y @ params["a"]) @ params["b"]
    if kind == "scale":
        return (x * params["g"] + params["h"]).tanh() * x.exp().clamp(max=2)
    if kind == "cast":
        return x + F.gelu(x.float() @ params["a"].float()).double() @ params["b"]
    if kind == "dropout":
        return x + fp.random.dropout(F.gelu(x @ params["a"]), 0.3, key=fp.random.key(1)) @ params["b"]
    if kind == "shared":  # taken by the layers behind it, too
        y = F.gelu(x * params["g"])
        return y @ params["a"] @ params["b"] + y
    return F.gelu(first) * x.sin() + F.gelu(x @ params["a"]) @ params["b"]


def loss(params: Any, tokens: torch.Tensor, *, kinds: list[str]) -> torch.Tensor:
    first = x = F.embedding(tokens, params["table"])
    for kind, own in zip(kinds, params["layers"], strict=True):
        x = layer(kind, own, x, first)
    return ((x @ params["table"].T) ** 2).mean()


def tokens(size: int) -> torch.Tensor:
    return torch.randint(0, 5, (size, 3), generator=torch.Generator().manual_seed(size))


def draws_and_messages(program: Any) -> tuple[Counter[str], dict[Any, int]]:
    random = Counter(str(node.target) for node in program.traced.nodes if "uniform" in str(node.target))
    return random, dict(program.bytes_sent())


@st.composite
def plans(draw: st.DrawFn) -> tuple[Any, Mesh]:
    parts, name = [], draw(st.sampled_from(sorted(MESHES)))
    if draw(st.booleans()):
        parts.append(fp.remat(draw(st.sampled_from(["layers", "attention", "nothing"]))))
    if name == "tensor":
        parts.append(fp.tensor_parallel("tensor", SPLIT))
    stage, keep, prefetch = draw(st.integers(0, 3)), draw(st.booleans()), draw(st.integers(0, 2))
    parts.append(fp.zero(stage, "data", keep_gathered=keep, prefetch=prefetch))
    parts.append(fp.accumulate(draw(st.sampled_from([1, 2, 3]))))
    return fp.chain(*parts), MESHES[name]


NETWORKS = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3)
LAW = settings(
    max_examples=5,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@LAW
@given(kinds=NETWORKS, plan=plans(), bucket=st.sampled_from([None, 1 << 10, "auto"]))
def test_the_same_bits_in_no_more_memory(no_value_is_small: None, kinds: list[str], plan: Any, bucket: Any) -> None:
    f, params, batch = partial(loss, kinds=kinds), parameters(kinds), tokens(12)
    on, off = (
        fp.compile(fp.grad_and_value(plan[0](f)), plan[1], bucket=bucket, without=without) for without in ((), OFF)
    )
    results = [step(params, batch) for step in (on, off)]
    assert all(optree.tree_leaves(optree.tree_map(torch.equal, *results)))
    assert on.program.memory().peak <= off.program.memory().peak
    assert draws_and_messages(on.program) == draws_and_messages(off.program)


@LAW
@given(kinds=NETWORKS, plan=plans())
def test_a_training_step_needs_no_more_and_as_much_as_it_says(no_value_is_small: None, kinds: Any, plan: Any) -> None:
    def step(without: tuple[str, ...]) -> Any:
        train = fp.train_step(partial(loss, kinds=kinds), fp.optim.adamw(1e-2), plan[1], plan[0], without=without)
        return train.lower(train.init(parameters(kinds)), tokens(12))

    on, off = step(()), step(OFF)
    assert on.memory().peak <= off.memory().peak
    assert measured(on) == on.memory().peak


@LAW
@given(kinds=NETWORKS, plan=plans())
def test_at_no_moment_is_more_alive(no_value_is_small: None, of_what: None, kinds: list[str], plan: Any) -> None:
    """Op by op; a copy is compared with the op that it is made for."""
    step = fp.compile(fp.grad_and_value(plan[0](partial(loss, kinds=kinds))), plan[1], bucket=None, without=OFF)
    plain = step.lower(parameters(kinds), tokens(12)).traced
    trial, copy_of = plain.copy()
    copies = set(cheap.CheapValues(trial).drop())
    trial.seal()
    ledgers = cheap.StorageTable("", plain), cheap.StorageTable("", trial)
    before, after = (dict(zip(ledger.nodes, ledger.curve(), strict=True)) for ledger in ledgers)
    limits = {copy_of[node]: alive for node, alive in before.items()}
    limit = 0
    for node in reversed(ledgers[1].nodes):
        limit = limit if node in copies else limits[node]
        assert after[node] <= limit


# -----------------------------------------------------------------------------
# What is computed again, and what is not
# -----------------------------------------------------------------------------


def again(kinds: list[str], plan: Any = None, size: int = 12, **options: Any) -> Counter[str]:
    plan = plan if plan is not None else fp.data_parallel("data")
    program = fp.compile(fp.grad(plan(partial(loss, kinds=kinds))), Mesh(data=2), **options).lower(
        parameters(kinds), tokens(size)
    )
    copies = [node for node in program.traced.nodes if info(node).recomputed]
    assert max(Counter(info(node).forward_node.name for node in copies).values(), default=1) == 1
    names = (node.target._schema.name.split("::")[1] for node in copies if hasattr(node.target, "_schema"))
    return Counter(name for name in names if name not in ("view", "t", "pcast", "all_gather", "_unsafe_view"))


def test_activations_and_norms_follow_from_what_is_kept(no_value_is_small: None, of_what: None) -> None:
    embedding = Counter(embedding=1)
    assert again(["gelu"]) == embedding + Counter(gelu=1)
    assert again(["gate"]) == embedding + Counter(silu=1, mul=1)
    assert again(["norm"]) == embedding + Counter(native_layer_norm=1, gelu=1)


def test_norms_of_gathered_weights(no_value_is_small: None, of_what: None) -> None:
    """A norm's copy takes the weights that are gathered again for the norm's backward, if they are there yet."""
    found = {
        (keep, prefetch): again(["norm"], fp.zero(3, "data", keep_gathered=keep, prefetch=prefetch))
        for keep in (False, True)
        for prefetch in (0, 1)
    }
    assert found[False, 1]["native_layer_norm"] == found[True, 0]["native_layer_norm"] == 1
    assert found[False, 0]["native_layer_norm"] == 0
    assert all(each["gelu"] == 1 for each in found.values())


def test_what_does_not_follow_is_kept(no_value_is_small: None) -> None:
    def plain(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (torch.relu(x @ params) @ params).sigmoid().sum()  # derivatives take the results alone

    program = fp.compile(fp.grad(fp.data_parallel("data")(plain)), Mesh(data=1)).lower(torch.eye(4), torch.ones(8, 4))
    assert not any(info(node).recomputed for node in program.traced.nodes)


def test_small_values_are_kept(of_what: None) -> None:
    assert again(["gelu", "norm", "gate"]) == Counter()
    rows = 2 * cheap.LEAST // (3 * 2 * WIDTH * 8)  # on two ranks; three tokens a row
    assert again(["gelu"], size=rows + 2)["gelu"] == 1
    assert again(["gelu"], size=rows - 2)["gelu"] == 0


def test_casts_of_parameters_are_made_once_for_all_microbatches(no_value_is_small: None, of_what: None) -> None:
    casts = {n: again(["cast"], fp.chain(fp.zero(0, "data"), fp.accumulate(n))) for n in (1, 2)}
    assert casts[1]["_to_copy"] > 0
    assert casts[2]["_to_copy"] <= 2 * casts[1]["_to_copy"]


@pytest.mark.parametrize("name", ["data", "zero 1", "zero 3", "zero 3, kept", "tensor"])
@pytest.mark.every(3)
def test_a_gpt_needs_less(name: str) -> None:
    config = gpt.Config(2, 64, 2, 64)
    params, specs = split(gpt.init(config, 0))
    plan = {
        "data": fp.data_parallel("data"),
        "zero 1": fp.zero(1, "data"),
        "zero 3": fp.zero(3, "data"),
        "zero 3, kept": fp.zero(3, "data", keep_gathered=True),
        "tensor": fp.chain(fp.tensor_parallel("tensor", specs), fp.data_parallel("data")),
    }[name]
    mesh = Mesh(data=2, tensor=2) if name == "tensor" else Mesh(data=2)

    def peak(*without: str) -> int:
        train = fp.train_step(partial(gpt.loss, config=config), fp.optim.adamw(1e-3), mesh, plan, without=without)
        return train.lower(train.init(params), torch.zeros(32, 65, dtype=torch.int64)).memory().peak

    assert peak() < 0.9 * peak(*OFF)
