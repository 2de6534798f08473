"""ZeRO-1 and 2 with all parameters end to end in one vector: the same numbers, one collective each way."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P, local_shape

from .test_zero import SIZES, data, loss, network

FLAT = {stage: fp.zero(stage, "data", layout="flat") for stage in (1, 2)}
TENSOR = fp.tensor_parallel("tensor", {"a": P(None, "tensor"), "b": P("tensor"), "c": P("tensor")})


def trained(plan: Any, mesh: Mesh, sizes: list[int], steps: int, **options: Any) -> list[torch.Tensor]:
    """Everything a run leaves behind: parameters, optimizer state, losses."""
    dtype = options.pop("dtype", torch.float64)
    optimizer = options.pop("optimizer", fp.optim.adamw(1e-2))
    train = fp.train_step(loss, optimizer, mesh, plan, **options)
    state, losses = train.init(network(sizes, dtype)), []
    for _ in range(steps):
        state, metrics = train(state, *data(sizes, 8, dtype))
        losses.append(metrics.loss)
    return optree.tree_leaves((train.whole(state), losses))


def assert_same_bits(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert not [index for index, pair in enumerate(zip(found, wanted, strict=True)) if not torch.equal(*pair)]


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@cache
def clipped_on_one_rank(sizes: tuple[int, ...]) -> list[torch.Tensor]:
    return trained(None, Mesh(), list(sizes), 5, clip=0.1)


def flat_length(shapes: list[tuple[int, ...]], ranks: int) -> int:
    return -(-sum(map(math.prod, shapes)) // (64 * ranks)) * 64 * ranks


# -----------------------------------------------------------------------------
# The same numbers
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sizes", [[8, 16, 4], [7, 33, 5], [17, 129, 3]])
@pytest.mark.every(4)
def test_the_bits_of_every_other_layout(sizes: list[int], ranks: int, dtype: torch.dtype) -> None:
    mesh = Mesh(data=ranks)
    wanted = trained(fp.data_parallel("data"), mesh, sizes, 6, dtype=dtype)
    for plan in (fp.zero(1, "data"), *FLAT.values()):
        assert_same_bits(trained(plan, mesh, sizes, 6, dtype=dtype), wanted)


def test_a_bound_on_the_norm_that_is_not_felt_changes_no_bit() -> None:
    """One that is felt does: the norm is summed over runs of the vector, not over blocks of leaves."""
    mesh, sizes = Mesh(data=4), [7, 33, 5]
    plain, clipped = (fp.data_parallel("data"), FLAT[1])
    assert_same_bits(trained(clipped, mesh, sizes, 5, clip=1e6), trained(plain, mesh, sizes, 5, clip=1e6))
    assert_close(trained(clipped, mesh, sizes, 5, clip=0.1), trained(plain, mesh, sizes, 5, clip=0.1))


@settings(max_examples=8)
@given(
    sizes=SIZES,
    stage=st.sampled_from([1, 2]),
    ranks=st.sampled_from([1, 2, 4, 8]),
    clip=st.sampled_from([None, 0.05]),
    microbatches=st.sampled_from([None, "once", "each"]),
)
def test_shapes_of_any_size(sizes: list[int], stage: int, ranks: int, clip: float | None, microbatches: Any) -> None:
    more = [] if microbatches is None or ranks == 8 else [fp.accumulate(2, reduce=microbatches)]
    found = trained(fp.chain(FLAT[stage], *more), Mesh(data=ranks), sizes, 3, clip=clip)
    assert_close(found, trained(None, Mesh(), sizes, 3, clip=clip))


@pytest.mark.parametrize("mesh", [Mesh(data=2, tensor=2), Mesh(tensor=4, data=2)], ids=repr)
def test_beside_tensor_parallelism(mesh: Mesh) -> None:
    """A vector of each tensor rank's shards, and one of what is whole on all of them."""
    sizes = [7, 12, 5]
    flat, dims = (fp.chain(TENSOR, fp.zero(1, "data", layout=layout)) for layout in ("flat", "dims"))
    assert_same_bits(trained(flat, mesh, sizes, 6), trained(dims, mesh, sizes, 6))
    assert_close(trained(flat, mesh, sizes, 5, clip=0.1), clipped_on_one_rank(tuple(sizes)))


AXES = {
    "hybrid": ((fp.zero, 1, "shard"), fp.data_parallel("replica")),
    "hybrid, turned round": (fp.data_parallel("replica"), (fp.zero, 2, "shard")),
    "twice": (fp.zero(1, "replica"), (fp.zero, 1, "shard")),
    "parameters over the other": (fp.zero(3, "shard"), (fp.zero, 1, "replica")),
}


@pytest.mark.parametrize("name", AXES)
def test_two_data_axes(name: str) -> None:
    mesh, sizes = Mesh(replica=2, shard=2), [7, 9, 5]
    plans = [
        fp.chain(*(each[0](*each[1:], layout=layout) if isinstance(each, tuple) else each for each in AXES[name]))
        for layout in ("flat", "dims")
    ]
    found, wanted = (trained(plan, mesh, sizes, 6) for plan in plans)
    if name in ("twice", "parameters over the other"):  # a scalar, split by no dim, is summed in another order
        assert_close(found, wanted)
    else:
        assert_same_bits(found, wanted)
    assert_close(trained(plans[0], mesh, sizes, 5, clip=0.1), clipped_on_one_rank(tuple(sizes)))


def test_parameters_of_two_types_have_a_vector_each() -> None:
    def of_two(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss({name: leaf.double() for name, leaf in params.items()}, x, y)

    sizes, found = [7, 33, 5], []
    types = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float32, "s": torch.bfloat16}
    for layout in ("flat", "dims"):
        train = fp.train_step(of_two, fp.optim.adamw(1e-2), Mesh(data=2), fp.zero(1, "data", layout=layout))
        state = train.init({name: leaf.to(types[name]) for name, leaf in network(sizes).items()})
        for _ in range(5):
            state, metrics = train(state, *data(sizes, 8))
        found.append(optree.tree_leaves((train.whole(state), metrics.loss)))
        assert {name: leaf.dtype for name, leaf in train.params(state).items()} == types
        if layout == "flat":
            assert train.program.counts()[("psum_scatter", ("data",))] == 2
    assert_same_bits(*found)


@pytest.mark.parametrize("options", [
    {"compute": "bf16"}, {"compute": "fp16"}, {"compute": "bf16", "reduce": "bf16"},
    {"compute": "bf16", "reduce": "bf16", "keep": ["b"]},
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("more", [[], [fp.accumulate(2)], [fp.accumulate(2, reduce="each")]], ids=repr)
@pytest.mark.every(3)
def test_computed_narrow(options: dict[str, Any], more: list[Any]) -> None:
    """Gradients travel in the type asked for; with fp16 a loss scale is part of the state."""
    found, types = [], []
    for layout in ("flat", "dims"):
        plan = fp.chain(fp.mixed_precision(**options), fp.zero(2, "data", layout=layout), *more)
        train = fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(data=2), plan)
        state = train.init(network([7, 33, 5], torch.float32))
        for _ in range(5):
            state, metrics = train(state, *data([7, 33, 5], 8, torch.float32))
        found.append(optree.tree_leaves((train.whole(state), metrics.loss, metrics.skipped)))
        collectives = train.program.collectives()
        types.append({each.operand.dtype for each in collectives if each.kind == "psum_scatter"})
    assert_same_bits(*found)
    assert types[0] == types[1]


def test_an_overflow_skips_the_step() -> None:
    scale = fp.LossScale(initial=2.0**40)
    plan = fp.chain(fp.mixed_precision("fp16", loss_scale=scale), FLAT[1])
    train = fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(data=2), plan)
    state = train.init(network([7, 33, 5], torch.float32))
    before, _ = train.whole(state)
    after, metrics = train(state, *data([7, 33, 5], 8, torch.float32))
    assert metrics.skipped
    assert_same_bits(optree.tree_leaves(train.params(after)), optree.tree_leaves(before))


# -----------------------------------------------------------------------------
# Optimizers
# -----------------------------------------------------------------------------

DECAY = {"b": False, "s": 0.5}
OPTIMIZERS = {
    "sgd": fp.optim.sgd(0.1),
    "sgd, decay by path": fp.optim.sgd(0.1, momentum=0.9, weight_decay=0.1, decay=DECAY),
    "adam": fp.optim.adam(0.01, weight_decay=0.1, decay=DECAY),
    "adamw": fp.optim.adamw(0.01, weight_decay=0.1, decay=DECAY),
    "adamw, matrices decay": fp.optim.adamw(0.01, weight_decay=0.1, decay=lambda path, leaf: leaf.ndim > 1),
    "lion": fp.optim.lion(0.01, weight_decay=0.1, decay=DECAY),
    "values clipped": fp.optim.clip_value(fp.optim.adamw(0.01, weight_decay=0.1, decay=DECAY), 0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_elementwise_optimizer(name: str) -> None:
    """Weight decay by path is that of the parameters' own paths and shapes."""
    plan = fp.chain(TENSOR, FLAT[2])
    found = trained(plan, Mesh(data=2, tensor=2), [7, 12, 5], 5, optimizer=OPTIMIZERS[name])
    assert_close(found, trained(None, Mesh(), [7, 12, 5], 5, optimizer=OPTIMIZERS[name]))


def test_parameters_of_one_decay_share_a_vector() -> None:
    train = fp.train_step(loss, OPTIMIZERS["adamw"], Mesh(data=2), FLAT[1], bucket=None)
    program = train.lower(train.init(network([7, 33, 5])), *data([7, 33, 5], 8))
    assert program.counts()[("psum_scatter", ("data",))] == program.counts()[("all_gather", ("data",))] == 3


def of_the_user(constants: Any) -> fp.optim.Optimizer:
    """Plain descent, for which all parameters are alike."""

    def update(grads: Any, state: Any, params: Any, constants: Any = None) -> Any:
        step = lambda p, g: p if g is None else p - 0.1 * g  # noqa: E731
        return optree.tree_map(step, params, grads, none_is_leaf=True), state

    return fp.optim.Optimizer(lambda params: (), update, constants=constants)


def test_an_optimizer_of_ones_own() -> None:
    found = trained(FLAT[1], Mesh(data=2), [7, 9, 5], 3, optimizer=of_the_user(lambda params: 0))
    assert_close(found, trained(None, Mesh(), [7, 9, 5], 3, optimizer=of_the_user(None)))


# -----------------------------------------------------------------------------
# What is sent, and what is held
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("bucket", [None, 25 << 20, 100])
@pytest.mark.every(2)
def test_one_collective_each_way(ranks: int, bucket: int | None) -> None:
    """2Ψ(n−1)/n bytes, of the padded Ψ; beside them the sums of the loss and of the norm."""
    sizes, mesh = [7, 33, 5], Mesh(data=ranks)
    train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, FLAT[1], bucket=bucket)
    program = train.lower(train.init(network(sizes)), *data(sizes, 8))
    assert program.counts() == {
        (kind, ("data",)): n for kind, n in [("psum", 2), ("psum_scatter", 1), ("all_gather", 1)]
    }
    length = flat_length([(7, 33), (33,), (33, 5), ()], ranks)
    sent = program.bytes_sent()
    each_way = 8 * length * (ranks - 1) // ranks
    assert sent["psum_scatter", ("data",)] == sent["all_gather", ("data",)] == each_way
    assert [c.operand.numel for c in program.collectives() if c.kind == "psum_scatter"] == [length]


def test_shares_that_no_shape_disturbs() -> None:
    """Split by dims, a leaf of nine elements takes four ranks three each; end to end only the whole is filled up."""
    held = {}
    for layout in ("dims", "flat"):
        plan = fp.zero(1, "data", layout=layout)
        train = fp.train_step(
            lambda p, x: sum((w * x.sum()).sum() for w in p), fp.optim.adamw(0.1), Mesh(data=64), plan
        )
        state = train.init([torch.ones(65) for _ in range(63)])
        held[layout] = sum(handle[0].numel() for handle in state.handles[63:])
    assert held == {"dims": 1 + 2 * 63 * 2, "flat": 1 + 2 * 64}


@pytest.mark.parametrize("plan", [FLAT[1], FLAT[2], fp.chain(TENSOR, FLAT[2])], ids=repr)
def test_the_estimate_is_what_is_held(plan: Any) -> None:
    mesh, optimizer = Mesh(data=2, tensor=2), fp.optim.adamw(0.1, decay={"b": False})
    params = {**network([7, 12, 5]), "order": torch.arange(5), "name": "net"}
    train = fp.train_step(lambda *_: None, optimizer, mesh, plan)
    state = train.init(params)
    held = [handle[0].nbytes if isinstance(handle, list) else 0 for handle in state.handles]
    found = fp.estimate(params, mesh, plan, optimizer=optimizer)
    assert (found.parameters, found.optimizer) == (sum(held[:6]), sum(held[6:]))
    vectors = [handle[0] for handle in state.handles[6:] if isinstance(handle, list) and handle[0].is_floating_point()]
    share = sum(vector.nbytes for vector in vectors if vector.ndim) // 2  # the mean's, or the square's
    assert (found.gradients == share) == ("zero(2" in repr(plan)), "at stage 1 gradients are held whole"


def test_gradients_are_named_in_the_memory_of_a_program() -> None:
    def of_layers(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = torch.tanh(x @ w)
        return x.sum()

    params, mesh = [torch.ones(64, 64) for _ in range(8)], Mesh(data=8)
    train = fp.train_step(of_layers, fp.optim.sgd(0.1), mesh, FLAT[1])
    memory = train.lower(train.init(params), torch.ones(8, 64)).memory()
    assert memory.alive["gradients"] == 2 * 4 * 8 * 64 * 64, "the vector, and each of the gradients that it joins"


# -----------------------------------------------------------------------------
# State
# -----------------------------------------------------------------------------


@settings(max_examples=8)
@given(sizes=SIZES, ranks=st.sampled_from([1, 2, 4]), tensor=st.booleans())
def test_a_checkpoint_does_not_know_the_layout(sizes: list[int], ranks: int, tensor: bool) -> None:
    """What `whole` gives has the parameters' own tree, to the bit, and loads under any other plan."""
    sizes = [sizes[0], 2 * sizes[1], sizes[2]] if tensor else sizes
    mesh = Mesh(data=ranks, tensor=2 if tensor else 1)
    flat = fp.train_step(loss, fp.optim.adamw(0.1), mesh, fp.chain(*[TENSOR] * tensor, FLAT[1]))
    dims = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), fp.zero(3, "data"))
    params = network(sizes)
    moments = [optree.tree_map(lambda leaf, s=s: torch.rand_like(leaf) + s, params) for s in (0, 1)]
    saved = fp.optim.AdamWState(torch.tensor(3.0), *moments)  # type: ignore[attr-defined]
    for train in (flat, dims):
        again = train.whole(train.load(params, saved, 3))
        assert optree.tree_structure(again) == optree.tree_structure((params, saved))
        assert_same_bits(optree.tree_leaves(again), optree.tree_leaves((params, saved)))


def test_a_run_goes_on_under_another_layout() -> None:
    sizes, mesh = [7, 33, 5], Mesh(data=4)
    steps = {layout: fp.train_step(loss, fp.optim.adamw(0.1), mesh, fp.zero(1, "data", layout=layout))
             for layout in ("dims", "flat")}  # fmt: skip
    state, alone = (steps[layout].init(network(sizes)) for layout in ("flat", "dims"))
    for number in range(6):
        train = steps["flat" if number % 2 else "dims"]
        state = train.load(*steps["dims" if number % 2 else "flat"].whole(state), number)
        state, _ = train(state, *data(sizes, 8))
        alone, _ = steps["dims"](alone, *data(sizes, 8))
    assert_same_bits(optree.tree_leaves(train.whole(state)), optree.tree_leaves(steps["dims"].whole(alone)))


def test_leaves_that_are_not_trained_stay() -> None:
    def of_table(params: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x @ params["w"])[:, params["order"]] * params["factor"]).sum() + params["none"].sum()

    params = {"w": torch.ones(4, 3), "order": torch.tensor([2, 0, 1]), "factor": 2, "none": torch.ones(0, 3), "n": None}
    train = fp.train_step(of_table, fp.optim.adamw(0.1), Mesh(data=2), FLAT[1])
    state, _ = train(train.init(params), torch.arange(8.0).reshape(2, 4))
    new, moments = train.whole(state)
    assert optree.tree_structure(new) == optree.tree_structure(params) == optree.tree_structure(moments.mean)
    assert torch.equal(new["order"], params["order"]) and new["factor"] == 2 and new["none"].shape == (0, 3)
    assert not torch.equal(new["w"], params["w"])


def test_parameters_may_be_one_tensor_of_any_strides() -> None:
    w, x = torch.randn(3, 5, dtype=torch.float64).T, torch.randn(8, 5, dtype=torch.float64)
    found = []
    for plan in (FLAT[2], fp.data_parallel("data")):
        train = fp.train_step(lambda w, x: ((x @ w) ** 2).mean(), fp.optim.adamw(0.1), Mesh(data=2), plan)
        state = train.init(w)
        for _ in range(3):
            state, _ = train(state, x)
        found.append(optree.tree_leaves(train.whole(state)))
    assert_same_bits(*found)


def test_leaves_lie_in_vectors_where_kernels_like_them() -> None:
    """A leaf that would begin within a line of memory is copied out: kernels are slow there, or add otherwise."""
    params = {"a": torch.ones(64), "b": torch.ones(3), "c": torch.ones(64)}
    train = fp.train_step(
        lambda p, x: sum(w.sum() for w in p.values()) * x.sum(), fp.optim.sgd(0.1), Mesh(data=2), FLAT[1]
    )
    state, _ = train(train.init(params), torch.ones(2))
    a, b, c = (handle[0] for handle in state.handles[:3])
    storages = [leaf.untyped_storage().data_ptr() for leaf in (a, b, c)]
    assert storages[0] == storages[1] != storages[2]
    assert all(leaf.data_ptr() % 64 == 0 for leaf in (a, b, c))


# -----------------------------------------------------------------------------
# Bad input
# -----------------------------------------------------------------------------


def begin(optimizer: Any, plan: Any = FLAT[1]) -> Any:
    return fp.train_step(loss, optimizer, Mesh(pipe=1, data=2), plan).init(network([2, 2, 2]))


STAGED = fp.chain(FLAT[1], fp.pipeline("pipe", microbatches=2))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: fp.zero(0, "data", layout="flat"), r"zero\(0, 'data', layout='flat'\): stage 0 splits nothing.*1 or 2"),
    (lambda: fp.zero(3, "data", layout="flat"), r"layout='flat'\): stage 3 gathers each parameter.*stage 2"),
    (lambda: fp.zero(1, "data", layout="1d"), r"zero\(layout='1d'\): it is 'dims' or 'flat'"),
    (lambda: fp.zero(1, "data", {"a": P("data")}, layout="flat"), r"specs and whole_below split single parameters"),
    (lambda: fp.zero(2, "data", layout="flat", whole_below=9), r"specs and whole_below split single parameters"),
    (lambda: begin(fp.optim.sgd(0.1), STAGED), r"zero\(…, 'data', layout='flat'\).*layout='dims'"),
    (lambda: begin(fp.optim.adafactor(0.1)), r"not elementwise.*use layout='dims', or an elementwise one"),
    (lambda: begin(of_the_user(None)), r"does not say which it treats alike.*elementwise=True.*layout='dims'"),
])  # fmt: skip
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_to_train() -> None:
    train = fp.train_step(lambda p, x: x.sum(), fp.optim.sgd(0.1), Mesh(data=2), FLAT[1])
    with pytest.raises(ValueError, match="no parameter is a floating tensor, so there is nothing to train"):
        train(train.init({"n": torch.arange(3)}), torch.ones(2))


def test_a_state_of_other_shapes_is_refused() -> None:
    means = lambda params: optree.tree_map(lambda leaf: leaf.mean(), params)  # noqa: E731
    odd = fp.optim.Optimizer(means, lambda g, s, p, constants=None: (p, s), constants=lambda params: 0)
    with pytest.raises(ValueError, match=r"keeps \(\) for a, which is \(2, 2\).*Use layout='dims'"):
        begin(odd)


def test_local_shapes_are_those_of_shards() -> None:
    """What the vectors of a tensor rank are made of."""
    mesh = Mesh(data=2, tensor=2)
    train = fp.train_step(loss, fp.optim.sgd(0.1, momentum=0.9), mesh, fp.chain(TENSOR, FLAT[1]))
    state = train.init(network([7, 12, 5]))
    specs = [P(None, "tensor"), P("tensor"), P("tensor")]
    shapes = [local_shape(shape, spec, mesh) for shape, spec in zip([(7, 12), (12,), (12, 5)], specs, strict=True)]
    assert [handle[0].numel() for handle in state.handles[5:]] == [flat_length(shapes, 2) // 2, 64]
