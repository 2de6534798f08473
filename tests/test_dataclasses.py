"""Dataclasses as parameters, batches and results: pytrees from the first time on that the library meets one."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P, apply_rules, broadcast_specs, bytes_per_rank, shard, tree_paths, unshard

from .processes import run_on_processes

MESH = Mesh(data=2, tensor=2)


def fresh() -> Any:
    """Classes that no test has met: parameters, a batch with what is not a tensor in it, and a result."""

    @dataclass
    class Layer:
        w: Tensor
        scale: Tensor | None = None

    @dataclass(frozen=True)
    class Params:
        kind: ClassVar[str] = "two layers"
        w1: Layer
        w2: Layer
        activation: str = "relu"
        depth: int = 2

        def __post_init__(self) -> None:
            if not isinstance(self.w1, Layer):
                raise TypeError("w1 is a layer")

        @cached_property
        def size(self) -> int:
            return self.w1.w.numel()

    @dataclass(frozen=True, slots=True)
    class Batch:
        x: Tensor
        y: Tensor
        mask: Tensor | None = None
        name: str = field(default="train", kw_only=True)

    @dataclass
    class Out:
        loss: Tensor
        logits: Tensor
        note: str = "done"

    return Layer, Params, Batch, Out


def example() -> tuple[Any, Any, Any]:
    layer, params, batch, out = fresh()
    draw = torch.Generator().manual_seed(0)
    integers = lambda *shape: torch.randint(-3, 4, shape, generator=draw).double()  # noqa: E731
    given = params(layer(integers(4, 8), integers(8)), layer(integers(8, 2)))
    return given, batch(integers(8, 4), integers(8, 2)), out


def loss(params: Any, batch: Any) -> Tensor:
    assert type(params).__name__ == "Params" and params.activation == "relu" and params.size == params.w1.w.numel()
    assert batch.name == "train" and batch.mask is None
    hidden = (batch.x @ params.w1.w * params.w1.scale).relu()
    return ((hidden @ params.w2.w - batch.y) ** 2).sum()


def as_dicts(tree: Any) -> Any:
    if hasattr(tree, "__dataclass_fields__"):
        return {name: as_dicts(getattr(tree, name)) for name in tree.__dataclass_fields__ if hasattr(tree, name)}
    return tree


RULES = [("*w1/w", P(None, "tensor")), ("*w1/scale", P("tensor")), ("*w2/w", P("tensor")), ("*", P())]
PLAN = fp.chain(fp.tensor_parallel("tensor", RULES), fp.zero(3, "data"))


def test_a_gradient_of_a_dataclass_is_one() -> None:
    params, batch, _ = example()
    gradients, value = fp.grad_and_value(loss)(params, batch)
    assert type(gradients) is type(params) and gradients.depth is None
    step = fp.compile(fp.grad_and_value(PLAN(loss)), MESH)
    found, value = step(params, batch)
    assert value == loss(params, batch)
    for path in ("w1", "w2"):
        assert torch.equal(getattr(found, path).w, getattr(gradients, path).w)
    assert torch.equal(found.w1.scale, gradients.w1.scale) and found.w2.scale is None


@pytest.mark.parametrize("plan", [None, PLAN], ids=["no plan", "plan"])
def test_training_and_a_checkpoint(plan: Any) -> None:
    params, batch, _ = example()
    train = fp.train_step(loss, fp.optim.adamw(0.1), MESH, plan)
    state, first = train(train.init(params), batch)
    saved = train.whole(state)
    assert type(saved[0]) is type(params) and saved[0].activation == "relu"
    again = train.load(*saved, state.step)
    results = [train(each, batch) for each in (state, again)]
    after, restarted = (train.params(new) for new, _ in results)
    assert results[0][1].loss == results[1][1].loss != first.loss
    assert type(after) is type(params) and after.w2.scale is None
    assert all(map(torch.equal, tensors(after), tensors(restarted)))


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def test_a_step_is_that_of_the_same_tensors_in_dicts() -> None:
    params, batch, _ = example()
    dicts = fp.train_step(lambda p, b: loss_of_dicts(p, b), fp.optim.sgd(0.01), MESH, PLAN)
    ours = fp.train_step(loss, fp.optim.sgd(0.01), MESH, PLAN)
    wanted, _ = dicts(dicts.init(as_dicts(params)), as_dicts(batch))
    found, _ = ours(ours.init(params), batch)
    assert all(map(torch.equal, tensors(as_dicts(ours.params(found))), tensors(dicts.params(wanted))))


def loss_of_dicts(params: Any, batch: Any) -> Tensor:
    hidden = (batch["x"] @ params["w1"]["w"] * params["w1"]["scale"]).relu()
    return ((hidden @ params["w2"]["w"] - batch["y"]) ** 2).sum()


def test_results_and_aux_values() -> None:
    params, batch, out = example()

    def forward(params: Any, batch: Any) -> Any:
        logits = (batch.x @ params.w1.w).relu() @ params.w2.w
        return out((logits**2).sum(), logits)

    want = forward(params, batch)
    found = fp.compile(fp.data_parallel("data")(forward), Mesh(data=2))(params, batch)
    assert type(found) is out and torch.equal(found.logits, want.logits) and found.note == "done"
    bare = fp.compile(forward, Mesh(), in_specs=(P(), P()), out_specs=P())(params, batch)
    assert torch.equal(bare.logits, want.logits)

    def with_aux(params: Any, batch: Any) -> Any:
        result = forward(params, batch)
        return result.loss, result

    for each in (fp.data_parallel("data")(with_aux), None):
        if each is None:
            _, (_, aux) = fp.grad_and_value(with_aux, has_aux=True)(params, batch)
        else:
            _, (_, aux) = fp.compile(fp.grad_and_value(each, has_aux=True), Mesh(data=2))(params, batch)
        assert torch.equal(aux.logits, want.logits)


def test_other_transforms() -> None:
    params, batch, _ = example()
    per_sample = fp.vmap(fp.grad(loss), in_dims=(None, 0))
    one = type(batch)(batch.x[0], batch.y[0])
    assert torch.equal(per_sample(params, batch).w1.w[0], fp.grad(loss)(params, one).w1.w)
    compiled = fp.compile(per_sample, Mesh(), in_specs=(P(), P()), out_specs=P())
    assert torch.equal(compiled(params, batch).w1.w[0], fp.grad(loss)(params, one).w1.w)
    value, slope = fp.jvp(lambda p: loss(p, batch), (params,), (params,))
    assert value == loss(params, batch) and slope.ndim == 0
    for plan, mesh in (
        (fp.accumulate(2), Mesh()),
        (fp.pipeline("pipe", microbatches=2), Mesh(pipe=2)),
        (fp.remat(), Mesh()),
    ):
        step = fp.compile(fp.grad_and_value(plan(loss)), mesh)
        assert step(params, batch)[1] == value


def test_specs_in_the_same_class() -> None:
    params, batch, _ = example()
    kind, layer = type(params), type(params.w1)
    specs = object.__new__(kind)
    for name, value in {
        "w1": layer(P(None, "tensor"), P("tensor")),
        "w2": layer(P("tensor")),
        "activation": P(),
        "depth": P(),
    }.items():
        object.__setattr__(specs, name, value)
    assert broadcast_specs(specs, params).w1.w == P(None, "tensor")
    assert apply_rules(RULES, params).w1.scale == P("tensor")
    step = fp.compile(fp.grad_and_value(fp.tensor_parallel("tensor", specs)(loss)), Mesh(tensor=2))
    assert step(params, batch)[1] == loss(params, batch)
    assert bytes_per_rank(params, specs, Mesh(tensor=2)) == 8 * (32 + 8 + 16) // 2
    shards = [shard(params, specs, Mesh(tensor=2), rank) for rank in (0, 1)]
    assert shards[0].w1.w.shape == (4, 4) and torch.equal(unshard(shards, specs, Mesh(tensor=2)).w2.w, params.w2.w)


def test_paths_and_messages_name_fields() -> None:
    params, batch, _ = example()
    assert tree_paths(params) == ["w1/w", "w1/scale", "w2/w", "activation", "depth"]
    step = fp.compile(fp.tensor_parallel("tensor", [("w1.w", P("tensor")), ("*", P())])(loss), Mesh(tensor=3))
    with pytest.raises(ValueError, match=r"w1/w"):
        step(params, batch)
    array = type(batch)(batch.x.cpu().numpy(), batch.y)
    with pytest.raises(TypeError, match=r"1/x: an array, numpy\.ndarray"):
        fp.compile(fp.data_parallel("data")(loss), Mesh(data=2))(params, array)
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh())
    adamw = fp.train_step(loss, fp.optim.adamw(0.1), Mesh())
    other = adamw.whole(adamw.init(params))
    with pytest.raises(ValueError, match="does not belong to these parameters"):
        train.load(*other, 0)


def test_what_is_registered_already_and_what_holds_no_tensor_stays_as_it_is() -> None:
    layer, _, _, _ = fresh()
    own: Any = optree.register_pytree_node(
        layer,
        lambda one: ((one.w,), one.scale, ("weight",)),
        lambda scale, children: layer(children[0], scale),
        namespace=optree.registry.__GLOBAL_NAMESPACE,
    )
    assert tree_paths(own(torch.ones(2))) == ["weight"]

    @dataclass
    class Options:
        rate: float

    def scaled(x: Tensor, options: Options) -> Tensor:
        return x * options.rate

    step = fp.compile(fp.data_parallel("data", batch=P())(scaled), Mesh(data=2))
    assert step(torch.ones(2), Options(3.0)).sum() == 6 and step(torch.ones(2), Options(4.0)).sum() == 8
    assert optree.tree_is_leaf(Options(3.0))


def test_attributes_beside_fields_are_kept() -> None:
    @dataclass
    class Marked:
        x: Tensor

        def __post_init__(self) -> None:
            self.note, self.extra = "set later", self.x * 2

    given = Marked(torch.arange(4.0))
    found = fp.compile(lambda m: m, Mesh(), in_specs=P(), out_specs=P())(given)
    assert found.note == "set later" and torch.equal(found.extra, given.extra)


@dataclass(frozen=True)
class Pair:
    w: Tensor
    b: Tensor


def test_a_state_in_a_file() -> None:
    train = fp.train_step(
        lambda p, x: (x @ p.w + p.b).square().sum(), fp.optim.adamw(0.1), Mesh(data=2), fp.zero(1, "data")
    )
    state, _ = train(train.init(Pair(torch.ones(4, 2), torch.ones(2))), torch.ones(4, 4))
    file = io.BytesIO()
    torch.save(train.whole(state), file)
    file.seek(0)
    again = train.load(*torch.load(file, weights_only=False), state.step)
    assert torch.equal(train.params(again).w, train.params(state).w)


def train_on_a_rank(rank: int) -> list[Tensor]:
    params, batch, _ = example()
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), fp.zero(3, "data"))
    state, metrics = train(train.init(params), batch)
    return [metrics.loss, *tensors(train.params(state))]


def test_on_processes() -> None:
    """Each process registers the classes by itself."""
    wanted = train_on_a_rank(0)  # simulated
    for found in run_on_processes(train_on_a_rank, 2):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
