"""Draws are pure functions of a key and a position in the whole tensor: good numbers, and the same on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import functional_parallel as fp
from functional_parallel.errors import RandomKeyError
from functional_parallel.ir import info
from functional_parallel.program.work import bytes_moved
from functional_parallel.random import DRAW
from functional_parallel.testing.tracker import tracked
from sharding_specs import Mesh, P

KEY = fp.random.key(7)
MESHES = [Mesh(data=2), Mesh(data=4), Mesh(data=2, tensor=2), Mesh(data=2, seq=2, tensor=2)]
DRAWS = {"uniform": fp.random.uniform, "normal": fp.random.normal}


# -----------------------------------------------------------------------------
# The numbers
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_uniform_numbers_are_uniform(dtype: torch.dtype) -> None:
    count = 100_000
    x = fp.random.uniform(KEY, torch.empty(count, dtype=dtype))
    assert x.dtype == dtype and bool((x >= 0).all()) and bool((x < 1).all())
    x = x.double()
    step = (
        2.0**-8 if dtype == torch.bfloat16 else 0.0
    )  # a bfloat16 holds 256 such numbers, each the floor of what it stands for
    assert abs(x.mean() + step / 2 - 0.5) < 5 * math.sqrt(1 / 12 / count)
    assert abs(x.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
    histogram = torch.histc(x, 16, 0, 1)
    assert ((histogram - count / 16) ** 2 / (count / 16)).sum() < 45, "chi squared of 15 degrees: 45 has p < 1e-4"


def test_normal_numbers_have_the_moments_of_a_normal() -> None:
    count = 100_000
    x = fp.random.normal(KEY, torch.empty(count, dtype=torch.float64))
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        assert abs((x**power).mean() - moment) < 5 * math.sqrt(variance / count), f"moment {power}"
    assert abs((x[1:] * x[:-1]).mean()) < 5 / math.sqrt(count), "neighbours are uncorrelated"


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_drops_a_share_of_p(p: float) -> None:
    count = 100_000
    y = fp.random.dropout(torch.ones(count, dtype=torch.float64), p, key=KEY)
    share = (y == 0).double().mean()
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / count)
    assert torch.equal(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))


def test_dropout_of_a_bfloat16_hits_small_probabilities() -> None:
    """256 levels of a bfloat16 could not tell 0.001 from 0.004."""
    y = fp.random.dropout(torch.ones(200_000, dtype=torch.bfloat16), 0.001, key=KEY)
    assert y.dtype == torch.bfloat16
    assert abs((y == 0).double().mean() - 0.001) < 5 * math.sqrt(0.001 / 200_000)


def test_the_ends_of_dropout() -> None:
    x = torch.randn(8)
    assert fp.random.dropout(x, 0.0) is x and not fp.random.dropout(x, 1.0).any()
    with pytest.raises(ValueError, match=r"the dropout probability must be in \[0, 1\], not 1.5"):
        fp.random.dropout(x, 1.5, key=KEY)


# -----------------------------------------------------------------------------
# Keys and sites
# -----------------------------------------------------------------------------


def test_keys_differ_by_seed_and_by_every_number_folded_in() -> None:
    keys = {int(fp.random.key(seed)) for seed in range(1000)}
    keys |= {int(fp.random.fold_in(fp.random.key(seed), number)) for seed in range(30) for number in range(30)}
    keys |= {int(fp.random.fold_in(fp.random.fold_in(KEY, a), b)) for a in range(30) for b in range(30)}
    assert len(keys) == 2800, "no two collide: folding in is not commutative"


def test_streams_of_different_keys_are_uncorrelated() -> None:
    count = 20_000
    streams = [fp.random.normal(fp.random.fold_in(KEY, i), torch.empty(count, dtype=torch.float64)) for i in range(4)]
    products = torch.stack(streams) @ torch.stack(streams).T / count
    assert (products - torch.eye(4, dtype=torch.float64)).abs().max() < 5 * math.sqrt(2 / count)


def test_the_ambient_key_gives_each_site_its_own_numbers_and_starts_anew() -> None:
    x = torch.ones(256)

    def two_sites() -> tuple[Tensor, Tensor]:
        with fp.random.using(KEY):
            return fp.random.dropout(x), fp.random.dropout(x)

    first, second = two_sites()
    assert not torch.equal(first, second)
    assert all(map(torch.equal, two_sites(), (first, second)))
    with fp.random.using(fp.random.fold_in(KEY, 1)):
        assert not torch.equal(fp.random.dropout(x), first)


def test_inner_keys_do_not_disturb_the_sites_of_the_outer_one() -> None:
    x = torch.ones(256)
    with fp.random.using(KEY):
        fp.random.dropout(x)
        with fp.random.using(fp.random.key(1)):
            fp.random.dropout(x)
        second = fp.random.dropout(x)
    with fp.random.using(KEY):
        assert torch.equal([fp.random.dropout(x), fp.random.dropout(x)][1], second)


def test_without_a_key_the_error_names_four_ways_out() -> None:
    with pytest.raises(RandomKeyError) as raised:
        fp.random.dropout(torch.ones(3))
    for way in ("fp.random.key(seed)", "fp.random.using(key)", "train_step(seed=…)", "eval mode"):
        assert way in str(raised.value)


# -----------------------------------------------------------------------------
# On meshes
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("draw", DRAWS)
def test_every_mesh_draws_the_numbers_of_one_device(draw: str, mesh: Mesh) -> None:
    def f(w: Tensor, x: Tensor) -> Tensor:
        return x * w + DRAWS[draw](KEY, x)

    x = torch.zeros(8, 6, dtype=torch.float64)
    mapped = fp.compile(fp.data_parallel("data")(f), mesh)
    assert torch.equal(mapped(torch.ones((), dtype=torch.float64), x), DRAWS[draw](KEY, x))


@settings(max_examples=9)
@given(
    rows=st.integers(1, 3), columns=st.integers(1, 3), data=st.sampled_from([1, 2, 3]), tensor=st.sampled_from([1, 2])
)
def test_dropout_of_an_activation_split_both_ways(rows: int, columns: int, data: int, tensor: int) -> None:
    """The batch over data, the features over tensor: each rank asks for its block's positions."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        return (fp.random.dropout(x @ w, 0.4, key=KEY) ** 2).sum()

    generator = torch.Generator().manual_seed(rows + 10 * columns)
    w = torch.randint(-3, 4, (2, columns * tensor), generator=generator).double()
    x = torch.randint(-3, 4, (rows * data, 2), generator=generator).double()
    plan = fp.chain(fp.tensor_parallel("tensor", P(None, "tensor")), fp.data_parallel("data"))
    fp.testing.assert_equivalent(f, plan, Mesh(data=data, tensor=tensor), w, x, rtol=1e-13)


@settings(max_examples=9)
@given(st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.sampled_from([1, 2]), st.sampled_from([1, 3]), st.booleans())
def test_each_rank_of_two_axes_draws_its_own_part_alone(
    sizes: tuple[int, int], rows: int, blocks: int, has_keys: bool
) -> None:
    """The transform outside splits the draw of the one inside: no rank draws more, and no key is gathered."""
    mesh = Mesh(data=sizes[0], tensor=sizes[1])
    shape = (rows * sizes[0], 2 * blocks * sizes[1])
    keys = fp.random.fold_in(KEY, torch.arange(shape[0]))
    split = P(None, (blocks, "tensor"))

    def f(w: Tensor, keys: Tensor) -> Tensor:
        if has_keys:
            return w + torch.func.vmap(fp.random.normal)(keys, w)
        return fp.random.dropout(w * 1, 0.5, key=KEY) + fp.random.uniform(KEY, w)

    inner = fp.partition(f, "tensor", (split, P()), split)
    step = fp.compile(fp.partition(inner, "data", (P("data"), P("data")), P("data")), mesh)
    w = torch.arange(1.0, 1 + shape[0] * shape[1], dtype=torch.float64).reshape(shape)
    wanted = w + torch.stack([fp.random.normal(key, row) for key, row in zip(keys, w, strict=True)])
    if not has_keys:
        wanted = fp.random.dropout(w, 0.5, key=KEY) + fp.random.uniform(KEY, w)
    assert torch.equal(step(w, keys), wanted)
    assert isinstance(step.program, fp.Program) and step.program.counts() == {}
    found = [node for node in step.program.traced.nodes if node.target is DRAW]
    assert found and all(info(node).aval.numel == shape[0] * shape[1] // mesh.size for node in found)


def test_fused_dims_draw_by_their_place_in_the_whole() -> None:
    """A dim of 3 blocks whose inner factor is sharded: a rank's elements lie in three runs of the whole."""

    def f(w: Tensor) -> Tensor:
        return (fp.random.dropout(w * 1, 0.5, key=KEY) * torch.arange(12, dtype=torch.float64)).sum()

    plan = fp.tensor_parallel("tensor", P((3, "tensor")))
    fp.testing.assert_equivalent(f, plan, Mesh(tensor=2), torch.ones(12, dtype=torch.float64), exact=True)


@pytest.mark.parametrize("blocks", [1, 3])
def test_ranks_that_vmap_maps_draw_their_parts(blocks: int) -> None:
    """The oracle: the position of a rank, or a table of its positions, is a mapped value."""
    spec = P((3, "data")) if blocks == 3 else P("data")
    partitioned = fp.partition(lambda w: fp.random.dropout(w * 1, 0.5, key=KEY), "data", (spec,), spec)
    w = torch.arange(1.0, 25)
    parts = w.reshape(blocks, 2, -1).movedim(1, 0).reshape(2, -1)
    found = fp.vmap(partitioned, axis_name="data")(parts)
    whole = found.reshape(2, blocks, -1).movedim(0, 1).reshape(-1)
    assert torch.equal(whole, fp.random.dropout(w, 0.5, key=KEY))


MAPPED = {
    "keys": (P("data"), P()),
    "keys and rows": (P("data"), P("data")),
    "rows": (P(), P("data")),
    "columns": (P(), P(None, "data")),
    "nothing": (P(), P()),
}


@pytest.mark.parametrize("split", MAPPED)
def test_draws_mapped_over_keys(split: str) -> None:
    """One op for all of them, however its operands lie; torch would call an op without a rule once per key."""
    keys = torch.stack([fp.random.fold_in(KEY, number) for number in range(4)])
    like = torch.zeros(6, 2, dtype=torch.float64)

    def draws(keys: Tensor, like: Tensor) -> Tensor:
        return torch.func.vmap(fp.random.normal, (0, None))(keys, like)

    wanted = torch.stack([fp.random.normal(key, like) for key in keys])
    assert torch.equal(draws(keys, like), wanted)
    step = fp.compile(fp.partition(draws, "data", MAPPED[split], parameters=None), Mesh(data=2))
    assert torch.equal(step(keys, like), wanted)
    twice = torch.func.vmap(lambda rows, own: draws(own, rows), (0, None))
    assert torch.equal(twice(like[None].expand(3, 6, 2), keys), wanted.expand(3, 4, 6, 2))
    assert torch.equal(torch.func.vmap(twice, (None, 0))(like[None], keys[:, None])[:, 0], wanted[:, None])
    ambient = torch.func.vmap(lambda row: fp.random.uniform(KEY, row))(like)
    assert torch.equal(ambient, fp.random.uniform(KEY, like[0]).expand(6, 2)), "one key, the same numbers"


def test_a_draw_takes_one_key() -> None:
    with pytest.raises(ValueError, match=r"takes one key, a scalar, not \(3,\): map over keys by torch.func.vmap"):
        fp.random.uniform(torch.arange(3), torch.zeros(3))


class Dropped(torch.nn.Module):
    """One of torch's dropouts behind a linear layer."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(4, 6), drop

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x))


TORCHS = {
    "Dropout1d": lambda: Dropped(torch.nn.Dropout1d(0.4)),
    "Dropout, in place": lambda: Dropped(torch.nn.Dropout(0.4, inplace=True)),
    "F.dropout, of which only the effect is used": lambda: Dropped(lambda x: (F.dropout(x, 0.4, inplace=True), x)[1]),
    "AlphaDropout": lambda: Dropped(torch.nn.AlphaDropout(0.4)),
    "FeatureAlphaDropout": lambda: Dropped(torch.nn.FeatureAlphaDropout(0.4)),
    "torch.dropout": lambda: Dropped(lambda x: torch.dropout(x, 0.4, True)),
    "the kernel on CUDA": lambda: Dropped(lambda x: torch.native_dropout(x, 0.4, True)[0]),
    "LSTM": lambda: torch.nn.LSTM(4, 4, num_layers=2, dropout=0.4, batch_first=True),
    "attention": lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.4, batch_first=True),
}


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.every(2)
def test_torchs_own_dropouts_are_alike_on_every_mesh(name: str) -> None:
    fn, params = fp.functional(TORCHS[name]().double())
    x = torch.randn(4, 3, 4, dtype=torch.float64)

    def loss(params: Any, x: Tensor, key: Tensor) -> Tensor:
        with fp.random.using(key):
            result = fn(params, x)
        return (result[0] if isinstance(result, tuple) else result).sin().sum()

    plan = fp.data_parallel("data", batch=(P("data"), P()))
    one, two = (fp.compile(fp.grad_and_value(plan(loss)), Mesh(data=ranks)) for ranks in (1, 2))
    found = two(params, x, KEY)
    torch.testing.assert_close(found, one(params, x, KEY), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found, two(params, x, KEY), rtol=0, atol=0)
    assert two(params, x, fp.random.fold_in(KEY, 1))[1] != found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("drop", [torch.nn.Dropout1d(0.25), lambda x: torch.dropout(x, 0.25, True)])
def test_what_torchs_own_dropouts_leave(drop: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    def dropped(x: Tensor, key: Tensor) -> Tensor:
        with fp.random.using(key):
            return drop(x)

    step = fp.compile(dropped, Mesh(data=2), in_specs=(P("data"), P()), out_specs=P("data"))
    y = step(torch.ones(64, 64, 2, dtype=dtype), KEY)
    assert (
        set(y.unique().tolist()) == {0, torch.tensor(1 / 0.75, dtype=dtype).item()} and abs(float(y.mean()) - 1) < 0.05
    )
    assert isinstance(drop, torch.nn.Dropout1d) == torch.equal(y[..., 0], y[..., 1])


@pytest.mark.parametrize("compiled", [lambda f: fp.compile(f, Mesh(data=2)), lambda f: train_with(f)])
def test_a_key_around_a_compiled_function_is_refused(compiled: Any) -> None:
    """The program would draw from the first key in every call."""
    step = compiled(fp.data_parallel("data")(lambda w, x: (fp.random.dropout(x) * w).sum()))
    with fp.random.using(KEY), pytest.raises(RandomKeyError, match=r"Write `with fp.random.using\(key\):` inside"):
        step(torch.ones(4), torch.ones(8, 4))


def train_with(f: Any) -> Callable[[Tensor, Tensor], Any]:
    train = fp.train_step(f, fp.optim.sgd(0.1), Mesh(data=2))
    return lambda w, x: train(train.init(w), x)


def test_torchs_own_dropouts_without_a_key() -> None:
    step = fp.compile(torch.nn.Dropout1d(0.25), Mesh(data=2), in_specs=P(), out_specs=P())
    with pytest.raises(RandomKeyError, match=r"train_step\(seed=…\)"):
        step(torch.ones(4, 4, 2))


def test_a_model_draws_from_the_steps_key_on_every_mesh() -> None:
    """New numbers at each site and in each step, the same on every mesh and in microbatches."""

    def loss(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
        losses = []
        for draw in DRAWS.values():
            first, second = (draw(fp.random.next_key(), x) for _ in range(2))
            losses.append(((x + first - second) @ params["w"]).square().mean())
        return torch.stack(losses).sum(), losses

    def train(mesh: Mesh, plan: Any) -> list[list[Tensor]]:
        step = fp.train_step(loss, fp.optim.sgd(0.0), mesh, plan, seed=3, has_aux=True)
        state, losses = step.init({"w": torch.ones(4, 2, dtype=torch.float64)}), []
        for _ in range(2):
            state, metrics = step(state, torch.zeros(8, 4, dtype=torch.float64))
            losses.append([metrics.loss, *metrics.aux])
        return losses

    wanted = train(Mesh(data=1), fp.data_parallel("data"))
    assert all(first > 0.1 and first != second for first, second in zip(*wanted, strict=True))
    for mesh, plan in (
        (Mesh(data=4), fp.zero(3, "data")),
        (Mesh(data=2), fp.chain(fp.data_parallel("data"), fp.accumulate(2))),
        (Mesh(data=2, tensor=2), fp.chain(fp.tensor_parallel("tensor", {"w": P("tensor")}), fp.data_parallel("data"))),
    ):
        torch.testing.assert_close(train(mesh, plan), wanted, rtol=1e-12, atol=0)


def test_a_key_for_a_draw_without_one_around() -> None:
    with pytest.raises(RandomKeyError, match=r"next_key\(\) draws random numbers, but no key is given: .*train_step"):
        fp.random.next_key()


# -----------------------------------------------------------------------------
# Under torch.func
# -----------------------------------------------------------------------------


def test_a_gradient_sees_the_same_mask() -> None:
    x = torch.randn(64, dtype=torch.float64)
    mask = fp.random.dropout(torch.ones_like(x), 0.3, key=KEY)
    drop = lambda x: fp.random.dropout(x, 0.3, key=KEY)  # noqa: E731
    assert torch.equal(torch.func.grad(lambda x: drop(x).sum())(x), mask)
    assert torch.equal(torch.func.jvp(drop, (x,), (torch.ones_like(x),))[1], mask)
    assert torch.equal(torch.func.hessian(lambda x: (drop(x) ** 2).sum())(x), torch.diag(2 * mask * mask))


def test_vmap_over_keys_draws_what_each_key_draws() -> None:
    keys = torch.stack([fp.random.key(seed) for seed in range(3)])
    x = torch.ones(5, 4)
    mapped = torch.func.vmap(lambda key: fp.random.uniform(key, x))(keys)
    assert all(torch.equal(mapped[i], fp.random.uniform(key, x)) for i, key in enumerate(keys))


def test_per_sample_gradients_with_a_key_per_sample() -> None:
    keys = torch.stack([fp.random.fold_in(KEY, i) for i in range(4)])
    w, x = torch.randn(6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)

    def loss(w: Tensor, x: Tensor, key: Tensor) -> Tensor:
        return (fp.random.dropout(w * x, 0.5, key=key) ** 2).sum()

    mapped = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(w, x, keys)
    for i in range(4):
        assert torch.equal(mapped[i], torch.func.grad(loss)(w, x[i], keys[i]))


# -----------------------------------------------------------------------------
# Kernels and memory
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_is_three_kernels_and_saves_a_byte_per_element(dtype: torch.dtype) -> None:
    """One for the mask, and one product in each direction, as torch's own dropout on CUDA."""

    def loss(x: Tensor, key: Tensor) -> Tensor:
        return fp.random.dropout(x, 0.1, key=key).sin().sum()

    x = torch.ones(64, 128, dtype=dtype)
    step = fp.compile(fp.grad(loss), Mesh(), in_specs=(P(), P()), out_specs=P())
    program = step.lower(x, KEY)
    product = torch.ops.aten.native_dropout_backward.default
    kinds = [node.target for node in program.traced.nodes if node.target in (DRAW, product)]
    assert kinds == [DRAW, product, product]
    (mask,) = (node for node in program.traced.nodes if node.target is DRAW)
    assert info(mask).nbytes == x.numel() and bytes_moved(mask) == x.numel() + KEY.nbytes, (
        "x is read for its shape only"
    )
    with tracked((x, KEY)) as tracker:
        step(x, KEY)
    assert tracker.peak == program.memory().peak
    assert not {torch.ops.aten.div.Tensor, torch.ops.aten.bitwise_not.default} & {
        n.target for n in program.traced.nodes
    }


@settings(max_examples=30)
@given(
    p=st.floats(0, 1, exclude_min=True, exclude_max=True),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
)
def test_an_element_is_kept_if_its_uniform_number_is_not_less_than_p(p: float, dtype: torch.dtype, seed: int) -> None:
    key, x = fp.random.key(seed), torch.ones(500, dtype=dtype)
    wide = x if dtype.itemsize >= 4 else x.float()
    wanted = x * ~(fp.random.uniform(key, wide) < p) * (1 / (1 - p))
    assert torch.equal(fp.random.dropout(x, p, key=key), wanted)


def test_draws_of_integers_with_a_probability() -> None:
    """A uniform number of an integer is 0, so each event happened."""

    def drawn(x: Tensor, key: Tensor) -> Tensor:
        with fp.random.using(key):
            return torch.empty_like(x).bernoulli_(0.25)

    step = fp.compile(drawn, Mesh(), in_specs=(P(), P()), out_specs=P())
    found = step(torch.zeros(4000, dtype=torch.int64), KEY)
    assert abs(found.double().mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 4000)
