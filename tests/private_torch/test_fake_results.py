"""The private torch APIs in `functional_parallel/_torch/fake_results.py`, and the cache that is made with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_parallel import _torch
from functional_parallel._torch import fake_results

aten = torch.ops.aten
Op = Callable[..., Any]


class Cached(_torch.TorchDispatchMode):
    """A mode that calls every op through the cache, and counts how often torch computed one."""

    def __init__(self, mode: _torch.FakeTensorMode) -> None:
        super().__init__()
        self.results, self.computed = _torch.FakeResults(mode), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        def compute(*args: Any, **kwargs: Any) -> Any:
            self.computed += func is not torch.ops.prim.device.default
            return func(*args, **kwargs)

        return self.results.call(func, compute, args, kwargs or {}, None)


@contextmanager
def cached() -> Iterator[Cached]:
    fakes = _torch.FakeTensorMode(allow_non_fake_inputs=True)
    with fakes, Cached(fakes) as mode:
        yield mode


def looks(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x), [looks(each) for each in x]
    if not isinstance(x, Tensor):
        return x
    flags = x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference(), x.is_leaf, type(x), x.fake_mode is None
    memory = x.untyped_storage().nbytes()
    return x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, flags, memory, sorted(vars(x))


def again(mode: Cached, op: Callable[[], Any]) -> tuple[Any, int]:
    """What an op returns, and how often torch computes an op for it."""
    before = mode.computed
    return op(), mode.computed - before


OPS: dict[str, Op] = {
    "add a number": lambda x: x + 1,
    "add a float": lambda x: x + 1.5,
    "multiply by a bool": lambda x: x * True,
    "slice": lambda x: x[1:],
    "transpose": lambda x: aten.t.default(x),
    "concatenate": lambda x: torch.cat([x, x]),
    "clone": lambda x: x.clone(),
    "as float64": lambda x: x.to(torch.float64),
    "on meta": lambda x: aten._to_copy.default(x, device=torch.device("meta")),
    "sum of rows": lambda x: aten.sum.dim_IntList(x, [0]),
    "sum of columns": lambda x: aten.sum.dim_IntList(x, [1]),
    "largest": lambda x: x.real.max(1),
    "pieces": lambda x: aten.split.Tensor(x, 2),
    "like it": lambda x: torch.empty_like(x),
    "full": lambda x: x.new_full((3,), 2),
}

MAKERS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.empty(4, 6),
    "transposed": lambda: torch.empty(6, 4).t(),
    "a half": lambda: torch.empty(4, 12)[:, 6:],
    "the other half": lambda: torch.empty(4, 12)[:, :6],
    "expanded": lambda: torch.empty(1, 6).expand(4, 6),
    "float64": lambda: torch.empty(4, 6, dtype=torch.float64),
    "integers": lambda: torch.empty(4, 6, dtype=torch.int64),
    "complex": lambda: torch.empty(4, 6, dtype=torch.complex64),
    "conjugated": lambda: torch.empty(4, 6, dtype=torch.complex64).conj(),
    "negated": lambda: torch.empty(4, 6, dtype=torch.complex64).conj().imag,
    "on another device": lambda: torch.empty(4, 6, device="cuda" if torch.cuda.is_available() else "meta"),
    "trained": lambda: torch.empty(4, 6).requires_grad_(),
}


def test_operands_that_differ_in_one_property_share_no_result() -> None:
    """Each op on each operand, twice: what a mode without the cache returns, and the second time from the cache."""
    with _torch.FakeTensorMode():
        wanted = {(op, make): looks(OPS[op](MAKERS[make]())) for op in OPS for make in MAKERS}
    with cached() as mode:
        for _ in range(2):
            found = {(op, make): looks(OPS[op](MAKERS[make]())) for op in OPS for make in MAKERS}
            assert found == wanted
        before, x = mode.computed, MAKERS["contiguous"]()
        for op in ("add a number", "concatenate", "sum of rows", "slice", "largest"):
            OPS[op](x)
        assert mode.computed == before


SETTINGS: list[tuple[str, Callable[[], Any], Op]] = [
    ("default dtype", lambda: default_dtype(torch.float64), lambda x: torch.empty(3, dtype=torch.int64) / 2),
    ("deterministic mode", lambda: deterministic(), lambda x: x.cumsum(0)),
    ("autocast", lambda: torch.autocast("cpu", torch.bfloat16), lambda x: x @ x),
    ("inference mode", lambda: torch.inference_mode(), lambda x: x + 1),
    ("no gradients", lambda: torch.no_grad(), lambda x: x.requires_grad_() + 1),
]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "inside", "op"), SETTINGS, ids=[name for name, *_ in SETTINGS])
def test_calls_under_another_setting_share_no_result(name: str, inside: Callable[[], Any], op: Op) -> None:
    def both(first: Any, second: Any) -> list[Any]:
        found = []
        for context in (first, second):
            x = torch.empty(4, 4)
            with context:
                found.append(looks(op(x)))
        return found

    with _torch.FakeTensorMode():
        wanted = both(nullcontext(), inside())
    with cached():
        assert both(nullcontext(), inside()) == wanted
    with cached():
        assert both(inside(), nullcontext()) == wanted[::-1]


def test_the_deterministic_mode_is_part_of_a_key() -> None:
    with cached() as mode:
        x = torch.empty(4)
        assert [again(mode, lambda: x + 1)[1] for _ in range(2)] == [1, 0]
        with deterministic():
            assert again(mode, lambda: x + 1)[1] == 1


def test_numbers_of_another_type_share_no_result() -> None:
    with cached() as mode:
        x = torch.empty(3, dtype=torch.int64)
        dtypes = [(x * number).dtype for number in (1, 1.0, True, 1j) * 2]
        assert dtypes == [torch.int64, torch.float32, torch.int64, torch.complex64] * 2
        assert mode.computed == 1 + 4


def memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def test_a_view_shares_the_memory_of_its_own_operand() -> None:
    with cached() as mode:
        for number in range(3):
            before, x = mode.computed, torch.empty(4, 6)
            views = [x[1:], aten.view.default(x, [24]), x.t(), x.expand(2, 4, 6), *aten.split.Tensor(x, 2), x.detach()]
            views += [aten._unsafe_view.default(x, [24]), aten.alias.default(x)]
            assert {memory(each) for each in views} == {memory(x)} and all(each is not x for each in views)
            assert len(set(map(id, views))) == len(views)
            fresh = [x + 1, x.clone(), torch.cat([x, x]), *x.max(0), torch.empty_like(x)]
            assert len({memory(each) for each in (x, *fresh)}) == 1 + len(fresh)
            assert number == 0 or mode.computed == before > 0


def test_what_depends_on_more_than_metadata_is_computed() -> None:
    with cached() as mode:
        x = torch.empty(4)
        calls: list[Callable[[], Any]] = [
            lambda: aten.bernoulli.p(x, 0.5),  # draws
            lambda: torch.rand(3),
            lambda: x.add_(1),  # in place
            lambda: aten.lift_fresh.default(x),
            lambda: x.is_same_size(torch.empty(4)),  # a number
        ]
        assert [again(mode, call)[1] for call in calls for _ in range(2)] == [1] * 10
        with pytest.raises(_torch.DATA_DEPENDENT_ERRORS):
            x.nonzero()
        with pytest.raises(_torch.DATA_DEPENDENT_ERRORS):
            x.sum().item()
        known = torch.tensor(3)
        assert (known + 1).item() == 4, "torch knows the value"
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"broadcast|must match"), _torch.unlogged_fakes():
                x + torch.empty(5)


def test_a_change_of_the_metadata_of_an_operand_is_seen() -> None:
    with cached() as mode:
        x = torch.empty(4, 1)
        assert (x + 1).shape == (4, 1)
        x.squeeze_()
        assert (x + 1).shape == (4,)
        x.data = torch.empty(2, 3)
        assert (x + 1).shape == (2, 3)
        assert mode.computed > 0


def test_a_made_result_is_differentiated_and_mapped_as_any() -> None:
    def f(x: Tensor) -> Tensor:
        return (x.t() @ x).tanh().sum()

    with cached() as mode:
        for _ in range(2):
            x = torch.empty(3, 4)
            assert torch.func.grad(f)(x).shape == (3, 4) == torch.func.vmap(torch.func.grad(f))(x[None])[0].shape
            (found,) = torch.autograd.grad(f(x.requires_grad_()), x)
            assert found.shape == (3, 4)
        assert mode.computed < 60


def test_an_operand_of_another_mode_or_a_real_one_is_left_to_torch() -> None:
    with _torch.FakeTensorMode():
        other = torch.empty(3)
    real = torch.ones(3)
    with cached() as mode:
        x = torch.empty(3)
        assert [again(mode, lambda: x + real)[1] for _ in range(2)] == [1, 1]
        assert [again(mode, lambda: x + other)[1] for _ in range(2)] == [1, 1]


def test_where_torch_makes_fake_tensors_otherwise_it_computes_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: Any) -> Any:
        raise TypeError("another signature")

    monkeypatch.setattr(fake_results, "_fake", changed)
    with cached() as mode:
        x = torch.empty(3)
        assert [again(mode, lambda: looks(x + 1)) for _ in range(2)] == [(looks(x.detach()), 1)] * 2
