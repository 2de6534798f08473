"""Ops that depend on strides have those of eager torch: random chains of views, copies and writes, exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import MemoryLayoutError, TracingError
from sharding_specs import Mesh, P

EXAMPLES = settings(max_examples=12)


def cumulated(x: Tensor) -> Tensor:
    b = x * 1
    b.transpose(0, -1).cumsum_(0)
    return b


def doubled(x: Tensor) -> Tensor:
    b = x.clone()
    b[..., 1::2].mul_(2)
    return b


def shared(x: Tensor) -> Tensor:
    """Of a view or a copy, as the strides allow, the first element is changed."""
    b = x * 1
    b.reshape(-1)[:1].add_(5)
    return b


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(0, -1),
    "permute": lambda x: x.permute(*range(1, x.ndim), 0),
    "every other": lambda x: x[..., ::2],
    "tail": lambda x: x[1:],
    "flip": lambda x: x.flip(0),
    "scale": lambda x: x * 3,
    "add transposed": lambda x: x.mT.contiguous().mT + x,
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(x.shape[-1], *x.shape[:-1]),
    "expand": lambda x: x[..., :1].expand(x.shape) * 1,
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "channels_last": lambda x: x.reshape(1, *x.shape).contiguous(memory_format=torch.channels_last)[0],
    "sum": lambda x: x.sum(0, keepdim=True) + x,
    "cumulated": cumulated,
    "doubled": doubled,
    "shared": shared,
}


@dataclass(frozen=True)
class Chain:
    """Steps by name, then an op that depends on strides."""

    steps: tuple[str, ...]
    end: str
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = STEPS[step](x)
        if self.end == "as_strided":
            return x.as_strided(self.size, self.stride) * 1
        if self.end == "as_strided_copy":
            return torch.as_strided_copy(x, self.size, self.stride)
        if self.end == "as_strided_scatter":
            source = x.new_full(self.size, 7)
            return torch.as_strided_scatter(x, source, self.size, self.stride)
        if self.end == "as_strided_":
            return (x * 1).as_strided_(self.size, self.stride) * 1
        if self.end == "stride":
            strides = [x.stride(dim) for dim, size in enumerate(x.shape) if size > 1]  # of one element any number does
            numbers = [*strides, x.is_contiguous(), x.storage_offset(), len(x.dim_order())]
            return x.sum() * torch.tensor([float(number) for number in numbers], dtype=x.dtype)
        raw = x[..., :1].expand(x.shape).contiguous().view(torch.int32)
        return x.sum() + raw.to(x.dtype)


ENDS = ["as_strided", "as_strided", "as_strided_copy", "as_strided_", "as_strided_scatter", "stride", "view"]


WITH_GRADIENTS = [end for end in ENDS if end != "as_strided_scatter"]  # torch's derivative is wrong
MAPPED = [end for end in WITH_GRADIENTS if end != "as_strided_"]  # torch's vmap leaves the shape as it was


@st.composite
def chains(draw: st.DrawFn, ends: list[str] = ENDS) -> Chain:
    steps = draw(st.lists(st.sampled_from(sorted(STEPS)), max_size=4))
    rank = draw(st.integers(1, 3))
    size, stride = (draw(st.tuples(*[each] * rank)) for each in (st.integers(1, 3), st.integers(0, 5)))
    return Chain(tuple(steps), draw(st.sampled_from(ends)), size, stride)


def result(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Of eager torch; a chain that it refuses says nothing."""
    try:
        return f(*args)
    except (RuntimeError, IndexError):
        assume(False)
        raise


def require_equal(wanted: Tensor, f: Callable[..., Tensor], *args: Tensor) -> None:
    """A program may refuse to read memory that is not the tensor's; nothing else."""
    try:
        found = f(*args)
    except MemoryLayoutError as error:
        assert "outside of its tensor" in str(error) or "interleaved elements" in str(error)
        return
    assert torch.equal(found, wanted)


def numbers(*shape: int) -> Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float64).reshape(shape)


MESH = Mesh(i=2, j=2)


@EXAMPLES
@given(chains())
def test_nothing_sharded(chain: Chain) -> None:
    x = numbers(2, 4, 6)
    require_equal(result(chain, x), fp.compile(chain, MESH, in_specs=P(), out_specs=P()), x)


@EXAMPLES
@given(chains(), st.integers(0, 2))
def test_a_sharded_argument(chain: Chain, dim: int) -> None:
    x, spec = numbers(2, 4, 6), P(*[None] * dim, "i")
    require_equal(result(chain, x), fp.compile(fp.partition(chain, "i", (spec,), P()), MESH), x)


@EXAMPLES
@given(chains(WITH_GRADIENTS))
def test_two_transforms(chain: Chain) -> None:
    x, w = numbers(2, 4, 6), numbers(4, 6)

    def f(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return chain(x + params["w"]).sum()

    plan = fp.chain(fp.tensor_parallel("i", {"w": P(None, "i")}), fp.data_parallel("j"))
    wanted = result(torch.func.grad(f), {"w": w}, x)
    require_equal(wanted["w"], lambda *args: fp.compile(fp.grad(plan(f)), MESH)(*args)["w"], {"w": w}, x)


@EXAMPLES
@given(chains())
def test_local_bodies(chain: Chain) -> None:
    x = numbers(2, 4, 6)
    body = fp.shard_map(chain, MESH, in_specs=P(None, None, "i"), out_specs=P("i"))
    wanted = result(lambda x: torch.cat([chain(part.contiguous()) for part in x.chunk(2, 2)]), x)
    require_equal(wanted, body, x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@EXAMPLES
@given(chains(MAPPED), st.booleans())
def test_under_vmap(chain: Chain, gradient: bool) -> None:
    """As torch does: of each sample alone; or not, where that maps a dim that is not the first in memory."""
    x = numbers(3, 2, 4, 6)
    eager: Any = torch.func.grad(lambda x: (chain(x) ** 2).sum()) if gradient else chain
    local = fp.partition(lambda x: (chain(x) ** 2).sum() if gradient else chain(x), "i", (P(None, "i"),), P())
    wanted = result(torch.func.vmap(eager), x)
    mapped = fp.vmap(fp.grad(local) if gradient else local)
    require_equal(wanted, fp.compile(mapped, MESH), x)
    require_equal(wanted, fp.compile(fp.vmap(eager), MESH, in_specs=P(), out_specs=P()), x)


# -----------------------------------------------------------------------------
# Cases from use
# -----------------------------------------------------------------------------


def written(x: Tensor) -> Tensor:
    b = x * 1
    b.transpose(0, 1).cumsum_(0)
    return b.as_strided((2,), (1,))


def changed_column(x: Tensor) -> Tensor:
    """A write through `as_strided` that is a slice of the tensor, or its transpose."""
    b = x.t() * 1
    b.as_strided((2, 3), (1, 8), 1).mul_(2)
    return b


@pytest.mark.parametrize("spec", [P(), P(None, "i")], ids=repr)
def test_a_write_through_as_strided(spec: P) -> None:
    x = numbers(6, 4)
    found = fp.compile(fp.partition(changed_column, "i", (spec,), P()), MESH)(x)
    assert torch.equal(found, changed_column(x)) and not torch.equal(found, x.t())


def overlapping(x: Tensor) -> Tensor:
    """Windows of a sequence, as sparse attention takes them; the batch stays where it is."""
    return x.as_strided((x.shape[0], 3, 4), (x.shape[1], 2, 1))


def test_a_gathered_value() -> None:
    x = numbers(2, 6)
    f = fp.compile(fp.partition(lambda x: (x.t() * 1).as_strided((3,), (1,)), "i", (P(None, "i"),), P()), MESH)
    assert f(x).tolist() == [1, 2, 3]


@pytest.mark.parametrize("spec", [P(), P(None, "i")], ids=repr)
def test_a_write_through_a_view(spec: P) -> None:
    x = numbers(4, 4)
    assert fp.compile(fp.partition(written, "i", (spec,), P()), MESH)(x).tolist() == written(x).tolist() == [1, 3]


def test_windows_of_a_sharded_batch_send_nothing() -> None:
    x = numbers(4, 8)
    step = fp.compile(fp.partition(overlapping, "i", (P("i"),), P("i")), MESH)
    assert torch.equal(step(x), overlapping(x))
    assert step.program.counts() == {}


# -----------------------------------------------------------------------------
# What is refused
# -----------------------------------------------------------------------------


def strides(x: Tensor) -> Tensor:
    return x.sum() * x.stride(0)


def offset(x: Tensor) -> Tensor:
    return x.sum() * (x * 1)[1:].storage_offset() + x.storage_offset()


def shared_by_strides(x: Tensor) -> Tensor:
    y = x.t().reshape(-1)
    y.add_(1)
    return x.sum() + y.sum()


@pytest.mark.parametrize("f", [strides, written, shared_by_strides])
@pytest.mark.parametrize("spec", [P(), P(None, "i")], ids=repr)
def test_an_argument_that_is_not_contiguous_is_named(f: Callable[[Tensor], Tensor], spec: P) -> None:
    step, x = fp.compile(fp.partition(f, "i", (spec,), P()), MESH), numbers(4, 4)
    assert torch.equal(step(x), f(x.clone()))
    with pytest.raises(
        MemoryLayoutError, match=r"test_memory_layout.py:\d+: .*strides \(1, 4\).*pass it .contiguous\(\)"
    ):
        step(x.t())


def test_a_storage_offset_is_named() -> None:
    step = fp.compile(offset, MESH, in_specs=P(), out_specs=P())
    assert step(numbers(3, 2)) == offset(numbers(3, 2))
    with pytest.raises(MemoryLayoutError, match=r"storage offset 2.*pass it .clone\(\)"):
        step(numbers(4, 2)[1:])


def test_a_batch_that_is_not_contiguous_is_named() -> None:
    loss = lambda w, batch: (w * batch["x"]).sum() * batch["x"].stride(0)  # noqa: E731
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.data_parallel("data"))
    state, _ = train(train.init(torch.ones(2)), {"x": torch.ones(4, 2)})
    with pytest.raises(MemoryLayoutError, match=r"1/0/x, of shape \(4, 2\), which has strides \(1, 4\)"):
        train(state, {"x": torch.ones(2, 4).t()})


def test_a_mapped_argument_that_is_not_contiguous_is_named() -> None:
    local = fp.partition(strides, "i", (P(),), P())
    with pytest.raises(MemoryLayoutError, match=r"strides \(24, 6\)"):
        fp.compile(fp.vmap(local, in_dims=2), MESH)(numbers(4, 4, 6))


ATTENTION = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize(
    "f",
    [
        lambda x: ATTENTION(x, x, x).stride(0) * x.sum(),
        lambda x: ATTENTION(x, x, x).mul(2).is_contiguous() * x.sum(),
        lambda x: ATTENTION(x, x, x).as_strided((2,), (1,)),
    ],
)
def test_strides_of_a_replaced_op_are_refused(f: Callable[[Tensor], Tensor]) -> None:
    """Attention is recorded as one op, whose result has other strides than a kernel's."""
    with pytest.raises(MemoryLayoutError, match=r"a result of scaled_dot_product_attention at test_memory_layout\.py"):
        fp.compile(fp.partition(f, "i", (P("i"),), P()), MESH)(numbers(2, 2, 3, 4))


def test_strides_after_a_replaced_op_may_be_known() -> None:
    f = lambda x: (ATTENTION(x, x, x) @ x.mT).sum() * (ATTENTION(x, x, x).flatten(0, 2) @ x[0, 0].mT).stride(0)  # noqa: E731
    x = numbers(2, 2, 3, 4) / 16
    found = fp.compile(fp.partition(f, "i", (P("i"),), P()), MESH)(x)
    torch.testing.assert_close(found, f(x), rtol=1e-12, atol=0)


def changed_beside_a_copy(x: Tensor) -> Tensor:
    y = ATTENTION(x, x, x).transpose(1, 2)
    z = y.reshape(2, -1)
    z.add_(1)
    return y.sum() + z.sum()


def changed_copy(x: Tensor) -> Tensor:
    z = ATTENTION(x, x, x).transpose(1, 2).reshape(2, -1)
    z.add_(1)
    return z.sum()


def test_a_write_into_a_view_or_a_copy_of_unknown_strides() -> None:
    x = numbers(2, 2, 3, 4) / 16
    with pytest.raises(MemoryLayoutError, match=r"add_.*changes in place .* shared by reshape at"):
        fp.compile(fp.partition(changed_beside_a_copy, "i", (P("i"),), P()), MESH)(x)
    found = fp.compile(fp.partition(changed_copy, "i", (P("i"),), P()), MESH)(x)  # the other is gone
    torch.testing.assert_close(found, changed_copy(x), rtol=1e-12, atol=0)


def outside(x: Tensor) -> Tensor:
    return x[1:].as_strided((2,), (1,), 0)


def address(x: Tensor) -> Tensor:
    return x * x.data_ptr()


def resized(x: Tensor) -> Tensor:
    return (x * 1).resize_(2)


def replaced(x: Tensor) -> Tensor:
    return (x * 1).set_(x.t() * 1)


def changed_windows(x: Tensor) -> Tensor:
    b = x * 1
    b.as_strided((3, 3), (2, 1)).mul_(2)
    return b


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (outside, "as_strided.*reads memory from -4 to -3, outside of its tensor's 12 elements"),
        (address, "data_ptr.*has no memory"),
        (resized, "resize_.* changes the memory"),
        (replaced, "set_.* changes the memory"),
        (changed_windows, "Another view of it, of shape"),
    ],
)
def test_what_needs_memory_is_refused(f: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(TracingError, match=r"test_memory_layout.py:\d+: .*" + message):
        fp.compile(f, MESH, in_specs=P(), out_specs=P())(numbers(4, 4))


def test_elements_that_only_touch_are_nested() -> None:
    """The 49 positions of the inner dims lie below the outer step of 50, as in the gradients of a batched QR."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 1).as_strided((2, 5, 2), (50, 12, 1)).as_strided((2, 3, 2), (50, 24, 1)) * 2

    x = torch.arange(100.0)
    assert torch.equal(fp.compile(f, Mesh(), in_specs=P(), out_specs=P())(x), f(x))
