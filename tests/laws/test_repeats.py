"""Law: copies of a layer that repeat the ops of another one give the program in which each is traced op by op.

Text, source lines and all other facts of each op, counts, bytes and peak are equal, and values to the bit. The program
without repeats is the reference.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import Source, info
from functional_parallel.partitioner import repeat
from functional_parallel.pipelines import PipelineProgram
from functional_parallel.program import Program
from sharding_specs import Mesh, P

from ..some_cases import one_in
from .layered_models import LAYERED, SAMPLES, Layered, batch, draw, ends, mlp
from .random_models import Model, models
from .random_plans import choices
from .test_model_laws import MODELS, plan_for

Plan = Callable[[Layered], Any]


def _tensor(model: Layered) -> Any:
    return fp.tensor_parallel("tensor", model.rules())


def _data(stage: int) -> Any:
    return fp.zero(stage, "data", whole_below=0) if stage == 3 else fp.zero(stage, "data")


BOTH = Mesh(data=2, tensor=2)
PLANS: dict[str, tuple[Plan, Mesh]] = {
    "tensor": (_tensor, Mesh(tensor=2)),
    "data": (lambda model: _data(0), Mesh(data=2)),
    "tensor, zero 1": (lambda model: fp.chain(_tensor(model), _data(1)), BOTH),
    "tensor, zero 3": (lambda model: fp.chain(_tensor(model), _data(3)), BOTH),
    "bf16, zero 2": (lambda model: fp.chain(fp.mixed_precision("bf16"), _data(2)), Mesh(data=2)),
    "remat, zero 3": (lambda model: fp.chain(fp.remat("layers"), _data(3)), Mesh(data=2)),
    "tensor, uneven ranks": (
        lambda model: fp.chain(_tensor(model), fp.data_parallel("data", master=0)),
        Mesh(data=3, tensor=2),
    ),
    "uneven microbatches": (lambda model: fp.chain(_data(2), fp.accumulate(3)), Mesh(data=2)),
    "pipeline": (lambda model: fp.chain(_data(1), fp.pipeline("pipe", microbatches=2)), Mesh(pipe=2, data=2)),
}
UNSUPPORTED = {
    ("marked", "pipeline"),  # more boundaries than stages
    ("batch norm", "pipeline"),  # sums over the microbatches in the forward
    ("random: filtered", "bf16, zero 2"),  # torch has no Fourier transform in bf16
}


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the copies that repeat others, and the backwards that are recorded for that."""
    found: Counter[str] = Counter()
    for name in ("forward", "_record"):
        original = getattr(repeat._RepeatedCopy, name)

        def counted(call: Any, *args: Any, original: Any = original, name: str = name) -> Any:
            found[name] += 1
            return original(call, *args)

        monkeypatch.setattr(repeat._RepeatedCopy, name, counted)
    return found


def lowered(make: Callable[..., Any], *args: Any) -> list[Program | PipelineProgram]:
    """The program with repeats, and the one without."""
    return [make(without=without).lower(*args) for without in ((), "repeats")]


def assert_same_programs(made: Program | PipelineProgram, wanted: Program | PipelineProgram) -> None:
    mine, theirs = (_without_numbers(each.lines()) for each in (made, wanted))
    assert mine == theirs
    assert _facts(made) == _facts(wanted)
    assert made.counts() == wanted.counts() and made.memory().peak == wanted.memory().peak
    assert made.bytes_sent() == wanted.bytes_sent()


def _without_numbers(lines: list[str]) -> list[str]:
    """The lines without the numbers in names of residuals, which a pipeline gives to the inputs of its programs."""
    return [re.sub(r"'([a-z_][a-z0-9_]*?)(_\d+)+'", r"'\1'", line) for line in lines]


def _facts(program: Program | PipelineProgram) -> list[Any]:
    """All facts of the ops. Regions are numbered anew, because each call of a recomputed function has a new number."""
    parts = [part for part, _ in program.programs()] if isinstance(program, PipelineProgram) else [program]
    numbers: dict[str | None, int] = {}

    def line(source: Source | None) -> Any:
        if source is None:
            return None
        return str(source), source.stage, source.implied, numbers.setdefault(source.region, len(numbers))

    found = []
    for known in (info(node) for part in parts for node in part.traced.nodes):
        rest = known._replace(source=None, used_at=None, forward_node=None, replaced_by=None, copy=None)
        found.append((rest, line(known.source), line(known.used_at)))
    return found


def assert_same_steps(make: Callable[..., Any], *args: Any) -> None:
    """Programs and values. Each step is lowered once for both."""
    steps = [make(without=without) for without in ((), "repeats")]
    assert_same_programs(*(step.lower(*args) for step in steps))
    mine, theirs = (optree.tree_leaves(step(*args)) for step in steps)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def seeded(loss: Callable[..., Any]) -> Callable[..., Any]:
    def call(params: Any, batch: Any, key: torch.Tensor) -> Any:
        with fp.random.using(key):
            return loss(params, batch)

    return call


def gradient_of(model: Layered, plan: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    make, mesh = PLANS[plan]
    local = fp.grad_and_value(make(model)(seeded(model.loss)))
    return lambda without: fp.compile(local, mesh, without=without), (
        model.parameters(),
        batch(),
        fp.random.key(3),
    )


# few of their layers have the same values, and the same cotangents
UNLIKE = {"cut off", "windows", "several sizes", "random: recurrent"}
OP_BY_OP = {
    # the slices of a replicated stream are computed from the op before the layer, which is not in the copy
    ("random: normalized", "tensor"),
    ("random: normalized", "tensor, zero 1"),
    ("random: normalized", "tensor, uneven ranks"),
    # the layers take slices along a dim that is split
    ("windows", "tensor"),
    ("windows", "tensor, uneven ranks"),
}


@one_in(23, name=LAYERED, plan=PLANS)
def test_of_layered_models(name: str, plan: str, count: Counter[str]) -> None:
    if (name, plan) in UNSUPPORTED:
        pytest.skip("refused without repeats too")
    make, args = gradient_of(LAYERED[name], plan)
    assert_same_steps(make, *args)
    assert count["forward"] or (name, plan) in OP_BY_OP
    assert count["_record"] <= max(2, count["forward"] // 3) or name in UNLIKE


@one_in(29, name=LAYERED, plan=PLANS)
def test_for_a_device_that_is_not_here(name: str, plan: str) -> None:
    if (name, plan) not in UNSUPPORTED and name != "closed over":  # its constant is on the CPU
        make, args = gradient_of(LAYERED[name], plan)
        assert_same_programs(*lowered(make, *fp.abstract(args, "cuda")))


@one_in(5, model=MODELS, mesh=[Mesh(data=2, tensor=2), Mesh(data=2), Mesh(tensor=2)])
def test_of_real_models(model: str, mesh: Mesh, count: Counter[str]) -> None:
    loss, parameters, samples, rules = MODELS[model]
    params = parameters(4) if "llama" in model else parameters()
    local = fp.grad_and_value(plan_for(mesh, rules, 3)(loss))

    def make(without: Any) -> Any:
        return fp.compile(local, mesh, without=without)

    assert_same_steps(make, params, *samples())
    assert count["forward"] or "llama" not in model


@pytest.mark.parametrize("plan", ["tensor, zero 3", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_of_a_training_step(plan: str, count: Counter[str]) -> None:
    """Donated state, an optimizer and clipping around the gradient."""
    model = LAYERED["post norm"]
    transforms, mesh = PLANS[plan]

    found, programs = [], []
    for without in ((), "repeats"):
        train = fp.train_step(
            model.loss, fp.optim.adamw(1e-2), mesh, transforms(model), clip=1.0, bucket="auto", without=without
        )
        state = train.init(model.parameters())
        for _ in range(2):
            state, metrics = train(state, batch())
        found.append(optree.tree_leaves((metrics.loss, train.params(state))))
        programs.append(train.program)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert_same_programs(*programs)
    assert count["forward"]


class Normed(torch.nn.Module):
    """Layers with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        of_layer = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Tanh(), torch.nn.Linear(4, 4)]
        self.layers = torch.nn.ModuleList(copy.deepcopy(torch.nn.Sequential(*of_layer)) for _ in range(5)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("groups", [None, pytest.param((2, 1), marks=pytest.mark.slow)])
def test_of_layers_with_running_statistics(groups: Any, count: Counter[str]) -> None:
    forward, params, buffers = fp.functional(Normed(), buffers=True, groups=groups)
    batch = draw(SAMPLES, 4)

    def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        found, new = forward(params, buffers, x)
        return found.square().mean(), new

    found, programs = [], []
    for without in ((), "repeats"):
        train = fp.train_step(
            loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(1, "data"), buffers=buffers, without=without
        )
        state = train.init(params)
        for _ in range(2):
            state, _ = train(state, batch)
        found.append(optree.tree_leaves((train.params(state), train.buffers(state))))
        programs.append(train.program)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert_same_programs(*programs)
    assert count["forward"] >= (2 if groups else 3)  # of five layers


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(st.data())
def test_of_random_models_and_plans(data: st.DataObject) -> None:
    drawn = data.draw(models(most=4))
    model = drawn if drawn.stacked else _repeated(drawn)
    choice = data.draw(choices(model))
    args = (model.parameters(), model.batch(0, 48), fp.random.key(0))
    local = fp.grad_and_value(choice.plan(model)(seeded(model)), has_aux=True)

    def make(without: Any) -> Any:
        return fp.compile(local, choice.mesh, without=without, bucket=choice.bucket)

    assert_same_steps(make, *args)


def _repeated(model: Model) -> Model:
    """A model with two periods of the same layers."""
    return replace(model, kinds=model.kinds * 2, marks=())


# --- Derivatives beyond one gradient: the copies run op by op ---


@one_in(4, transform=["second", "jvp", "vmap", "torch.func"])
def test_of_other_derivatives(transform: str) -> None:
    model, mesh = LAYERED["mlp"], Mesh(tensor=2)
    local = _tensor(model)(model.loss)
    params = model.parameters()
    spec = local.resolve((params, batch()), mesh).arguments
    gradient = fp.grad(local)

    def second(p: Any, samples: Any) -> Any:
        return fp.grad(lambda q: sum((leaf**2).sum() for leaf in optree.tree_leaves(gradient(q, samples))))(p)

    def jvp(p: Any, samples: Any) -> Any:
        return fp.jvp(lambda q: gradient(q, samples), (p,), (p,))[1]

    def vmap(p: Any, samples: Any) -> Any:
        return fp.vmap(gradient, (None, 0))(p, optree.tree_map(lambda x: x[:, None], samples))

    def plain(p: Any, samples: Any) -> Any:
        leaves, tree = optree.tree_flatten(p)
        return tree.unflatten(torch.func.grad(lambda given: local(tree.unflatten(given), samples))(leaves))

    run = {"second": second, "jvp": jvp, "vmap": vmap, "torch.func": plain}[transform]
    out = optree.tree_map(lambda each: P(None, *each.dims), spec[0]) if transform == "vmap" else spec[0]

    def make(without: Any) -> Any:
        return fp.compile(run, mesh, in_specs=spec, out_specs=out, without=without)

    assert_same_steps(make, params, batch())


# --- Order of the sums of gradients ---


def test_gradients_of_shared_values_are_added_in_the_order_of_the_flat_backward(count: Counter[str]) -> None:
    """In float32, where another order rounds differently: uses before, in and after the copies, several in each."""

    def stream(params: Any, x: torch.Tensor) -> torch.Tensor:
        shared = params["shared"].float()
        x = x.float() @ shared
        for w in params["layers"]:
            x = x + torch.tanh(x @ shared * 3.7) @ (w["square"].float() * shared) @ shared.T
        return (x @ shared).double()

    shapes = {"square": (8, 8)}
    model = Layered(ends(stream), shapes, {}, layers=6, more=(("shared", (8, 8)),))
    local = fp.grad_and_value(fp.data_parallel("data")(model.loss))

    def make(without: Any) -> Any:
        return fp.compile(local, Mesh(data=2), without=without)

    args = (model.parameters(), batch())
    assert_same_steps(make, *args)
    assert count["forward"] >= 4


def test_results_without_a_gradient() -> None:
    """Values of layers that the loss does not read: some outputs of a copy have no cotangent."""
    model = LAYERED["mlp"]

    def loss(params: Any, samples: Any) -> Any:
        x, found = torch.nn.functional.embedding(samples["tokens"], params["table"]), []
        for w in params["layers"]:
            x = mlp(w, x)
            found.append((x * params["table"][0]).mean())
        return (x**2).mean() + found[1], found

    local = fp.grad_and_value(fp.data_parallel("data")(loss), has_aux=True)

    def make(without: Any) -> Any:
        return fp.compile(local, Mesh(data=2), without=without)

    assert_same_steps(make, model.parameters(), batch())


def test_a_local_body_whose_results_have_no_gradient() -> None:
    """One of its results only reaches results of the copies that the loss does not read."""
    mesh = Mesh(data=2, tensor=2)

    def local(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fp.psum(w.sum(0, keepdim=True), "tensor") * w, w * 2

    def loss(params: Any, x: torch.Tensor) -> Any:
        shares = fp.shard_map(local, mesh, in_specs=(P("tensor"),), out_specs=(P("tensor"), P("tensor")))
        unread, read = shares(params["shared"])
        found = []
        for w in params["layers"]:
            x = torch.tanh(torch.nn.functional.layer_norm(x, (8,)) @ w @ read)
            found.append(torch.tanh(x @ unread).exp().mean())
        return x.square().mean(), found

    params = {"shared": draw(8, 8), "layers": [draw(8, 8, seed=n) for n in range(5)]}
    plan = fp.chain(fp.tensor_parallel("tensor", {"*": P()}), fp.data_parallel("data"))
    local_step = fp.grad_and_value(plan(loss), has_aux=True)

    def make(without: Any) -> Any:
        return fp.compile(local_step, mesh, without=without)

    assert_same_steps(make, params, draw(SAMPLES, 8))


def test_a_slice_of_a_result_is_computed_from_values_inside_the_copies() -> None:
    """The last product reads a slice of the stream: every op before it computes only that slice."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for each in params["layers"]:
            x = torch.tanh(x * each + 1.0) - x.exp()
        return (x @ params["last"]).square().mean()

    params = {"layers": [draw(8, seed=n) for n in range(5)], "last": draw(8, 8)}
    local = fp.grad_and_value(fp.partition(loss, "tensor", ({"layers": P(), "last": P("tensor")}, P())))

    def make(without: Any) -> Any:
        return fp.compile(local, Mesh(tensor=2), without=without)

    assert_same_steps(make, params, draw(SAMPLES, 8))


def test_layers_on_separate_lines_keep_their_lines(count: Counter[str]) -> None:
    """Each op has the line of its copy, also those that the library adds."""

    def stream(params: Any, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = params["layers"]
        x = x + torch.tanh(torch.nn.functional.layer_norm(x, (8,)) @ a["up"]) @ a["down"]
        x = x + torch.tanh(torch.nn.functional.layer_norm(x, (8,)) @ b["up"]) @ b["down"]
        x = x + torch.tanh(torch.nn.functional.layer_norm(x, (8,)) @ c["up"]) @ c["down"]
        x = x + torch.tanh(torch.nn.functional.layer_norm(x, (8,)) @ d["up"]) @ d["down"]
        return x

    mlps = LAYERED["mlp"]
    model = Layered(ends(stream), mlps.shapes, mlps.specs, layers=4)
    make, args = gradient_of(model, "tensor, zero 3")
    assert_same_programs(*lowered(make, *args))
    assert count["forward"]


def test_the_switch_has_its_name() -> None:
    step = fp.compile(fp.data_parallel("data")(lambda w, x: (x @ w).sum()), Mesh(data=2), without=["repeat"])
    with pytest.raises(ValueError, match="'repeats'"):
        step.lower(draw(8), draw(SAMPLES, 8))


# --- Numbers of the copies ---


@pytest.mark.parametrize("plan", ["tensor, zero 3", "uneven microbatches"])
def test_each_op_of_a_layer_has_the_number_of_its_copy(plan: str) -> None:
    """Forward and backward, in copies that ran op by op and in those that repeat others, and after all passes."""
    model = LAYERED["mlp"]
    make, args = gradient_of(model, plan)
    program = make(()).lower(*args)
    found: dict[tuple[int, int], set[tuple[str, bool]]] = {}
    for node in program.traced.nodes:
        if (number := info(node).copy) is not None:
            found.setdefault(number, set()).add((str(node.target), info(node).backward))
    (body,) = {body for body, _ in found}
    assert sorted(found) == [(body, index) for index in range(model.layers)]
    for kind in (("aten.gelu.default", False), ("aten.gelu_backward.default", True)):
        assert all(kind in ops for ops in found.values())
    assert make("repeats").lower(*args).lines() == program.lines()
