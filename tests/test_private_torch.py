"""Each private torch API in `functional_parallel/_torch` does what the library relies on.

When a test here fails after an upgrade of torch, that one file is the place to look.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from functional_parallel import _torch

from .threads import in_backward_thread

aten = torch.ops.aten


class Count(_torch.TorchDispatchMode):
    """Counts the ops it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_every_name_is_tested_here() -> None:
    text = Path(__file__).read_text()
    assert [name for name in _torch.__all__ if f"_torch.{name}" not in text] == []


def test_a_dispatch_mode_sees_ops_below_autograd() -> None:
    with Count() as mode:
        torch.nn.functional.linear(torch.ones(2, 3, requires_grad=True), torch.ones(4, 3))
    assert aten.mm.default in mode.seen and aten.linear.default not in mode.seen


def test_modes_can_be_set_aside() -> None:
    with Count() as mode:
        with _torch.apart_from_modes():
            torch.ones(2) + 1
        assert mode.seen == []
        assert _torch.dispatch_modes() == [mode]


def test_an_op_may_be_made_of_others() -> None:
    composite = [aten.matmul.default, aten.linear.default, aten.broadcast_tensors.default]
    assert all(map(_torch.is_composite, composite))
    assert not any(map(_torch.is_composite, [aten.mm.default, aten.add.Tensor, aten.view.default]))
    with Count() as mode:
        aten.matmul.default.decompose(torch.ones(2, 3), torch.ones(3, 2))
    assert aten.mm.default in mode.seen


def test_functions_are_not_seen_where_what_sees_them_is_set_aside() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(func)

    with Seen(), _torch.apart_from_functions():
        assert torch.ones(2).numpy().tolist() == [1, 1]


def test_a_fake_may_know_its_value_until_told_otherwise() -> None:
    with _torch.FakeTensorMode():
        x = torch.tensor(3)
        assert x.item() == 3
        assert _torch.without_constant(x) is x
        with pytest.raises(_torch.DATA_DEPENDENT_ERRORS):
            x.item()
    assert _torch.without_constant(torch.tensor(3)).item() == 3


def test_what_distributions_ask_about_values_has_a_name() -> None:
    class Asked(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            questions.append(func)
            return func(*args, **(kwargs or {}))

    questions: list[Any] = []
    with Asked():
        torch.distributions.Normal(torch.zeros(2), 1.0).log_prob(torch.ones(2))
    assert questions.count(_torch.is_all_true) == 3, "mean, deviation and sample"


def test_transforms_can_be_set_aside() -> None:
    """Inside, plain tensors are plain even while an enclosing grad is active."""
    found = []

    def f(x: torch.Tensor) -> torch.Tensor:
        assert _torch.differentiating_level() == 1
        with _torch.apart_from_transforms():
            found.append((_torch.differentiating_level(), _torch.is_functorch_wrapped(torch.ones(2) * 2)))
        assert _torch.differentiating_level() == 1
        return (x * x).sum()

    assert torch.equal(torch.func.grad(f)(torch.ones(2)), torch.full((2,), 2.0))
    assert found == [(0, False)]


def test_mapped_dims_of_the_plain_tensor() -> None:
    """The innermost level first; what an inner level took away an outer one does not count."""
    found = []

    def f(x: torch.Tensor) -> torch.Tensor:
        found.append((tuple(x.shape), _torch.mapped_dims(x), tuple(_torch.innermost(x).shape)))
        return x.sum()

    torch.func.vmap(torch.func.vmap(torch.func.grad(f), 1), 2)(torch.ones(2, 3, 4, 5))
    ((seen, dims, whole),) = found
    left = list(whole)
    for dim in dims:
        del left[dim]
    assert tuple(left) == seen == (2, 5) and len(dims) == 2
    assert _torch.mapped_dims(torch.ones(2)) == []


def test_fake_tensors_compute_shapes_and_refuse_values() -> None:
    with _torch.FakeTensorMode():
        x = torch.empty(2, 3)
    assert isinstance(x, _torch.FakeTensor) and (x @ x.t()).shape == (2, 2)
    assert _torch.DATA_DEPENDENT_ERRORS
    with pytest.raises(_torch.DATA_DEPENDENT_ERRORS):
        x.sum().item()
    with pytest.raises(_torch.DATA_DEPENDENT_ERRORS):
        x.nonzero()
    for split in (lambda x, at: torch.tensor_split(x, at)[0].sum(), torch.func.grad(lambda x, at: x.tensor_split(at))):
        with _torch.FakeTensorMode(), pytest.raises(RuntimeError) as found:
            split(torch.ones(4), torch.arange(2))
        assert _torch.reads_no_memory(found.value)
    assert issubclass(_torch.UnsupportedFakeTensor, Exception)


def test_what_a_backward_saves_is_detached_above_autograd() -> None:
    class Detached(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                found.append(_torch.is_above_autograd())
            return func(*args, **(kwargs or {}))

    found: list[bool] = []
    with _torch.FakeTensorMode(), Detached():
        x = torch.ones(3, requires_grad=True)
        y = torch.tanh(x).sum()
        torch.autograd.grad(y, x, create_graph=True)
        assert found and all(found), "its result, saved and looked up"
        found.clear()
        x.detach()
        with torch.no_grad():
            (x * 2).detach()
        torch.func.grad(lambda x: (x.detach() * torch.tanh(x)).sum())(torch.ones(3))
        assert found and not any(found)


def test_torch_logs_what_fails_on_fake_tensors_unless_told_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with _torch.FakeTensorMode():
        x = torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="reduction dim"), _torch.unlogged_fakes():
            x @ x
        assert not caplog.records
        _torch.FAKES.addHandler(caplog.handler)
        try:
            with pytest.raises(RuntimeError, match="reduction dim"):
                x @ x
        finally:
            _torch.FAKES.removeHandler(caplog.handler)
        assert [record.name for record in caplog.records][:1] == [_torch.FAKES.name]


def test_a_backward_node_carries_the_number_that_its_forward_got() -> None:
    running: list[int | None] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, cotangent):  # type: ignore[no-untyped-def]
            running.append(_torch.backward_node_number())
            return cotangent

    x = torch.ones(2, requires_grad=True)
    first = _torch.next_node_number()
    y = Note.apply(x)
    assert _torch.next_node_number() > first
    second = _torch.next_node_number()
    (y * 2).sum().backward()
    assert running[0] is not None and first <= running[0] < second
    assert _torch.backward_node_number() is None


def test_autograd_hands_dispatch_modes_on_to_its_threads() -> None:
    """And to no other thread; CUDA's backwards run in such threads, on which the recorder of a trace is found so."""
    seen: list[tuple[int, list[Any]]] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append((threading.get_ident(), _torch.dispatch_modes()))
        return x

    with _torch.FakeTensorMode() as outer, Count() as inner:
        in_backward_thread(note, torch.ones(2))
        thread = threading.Thread(target=note, args=(torch.ones(2),))
        thread.start()
        thread.join()
        with _torch.apart_from_modes():
            assert _torch.dispatch_modes() == []
    assert [modes for _, modes in seen] == [[outer, inner], []]
    assert threading.get_ident() not in {thread for thread, _ in seen}


def test_levels_of_torch_func_are_counted() -> None:
    seen: list[tuple[int, bool]] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append((_torch.differentiating_level(), _torch.needs_higher_derivatives()))
        return (x * x).sum()

    x = torch.ones(2)
    f(x)
    torch.func.vmap(f)(torch.ones(3, 2))
    torch.func.grad(f)(x)
    torch.func.vmap(torch.func.grad(f))(torch.ones(3, 2))
    torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(x)
    torch.func.jvp(f, (x,), (x,))
    torch.func.hessian(f)(x)
    assert seen == [(0, False), (0, False), (1, False), (1, False), (2, True), (1, True), (2, True)]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, lambda f: torch.func.grad(torch.func.grad(f))])
def test_wrappers_are_recognised_and_taken_off(transform: Callable[..., Callable[..., torch.Tensor]]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        assert _torch.is_functorch_wrapped(x)
        plain = _torch.innermost(x)
        assert not _torch.is_functorch_wrapped(plain) and plain.data_ptr() == data.data_ptr()
        return x * x

    data = torch.ones(()) if transform is not torch.func.vmap else torch.ones(3)
    transform(f)(data)
    assert not _torch.is_functorch_wrapped(data) and _torch.innermost(data) is data


def test_in_place_ops_have_functional_twins() -> None:
    assert _torch.functional_variant(aten.add_.Tensor) is aten.add.Tensor
    assert _torch.functional_variant(aten.copy_.default) is aten.copy.default
    assert _torch.functional_variant(aten.pow_.Scalar) is aten.pow.Tensor_Scalar  # its `Scalar` is a number's power
    assert _torch.functional_variant(aten.transpose_.default) is aten.transpose.int
    assert _torch.functional_variant(aten.add.Tensor) is None
    assert _torch.functional_variant(aten.fill_.Scalar) is aten.fill.Scalar
    assert _torch.functional_variant(aten.index_put_.default) is aten.index_put.default
    assert _torch.functional_variant(aten.div.out) is aten.div.Tensor
    assert _torch.functional_variant(aten.sum.IntList_out) is aten.sum.dim_IntList
    assert _torch.functional_variant(aten.add.Tensor) is None


def test_an_op_is_called_without_its_python_frame() -> None:
    direct = _torch.direct_call(aten.mm.default)
    assert direct is not aten.mm.default
    assert torch.equal(direct(torch.eye(2), torch.eye(2)), torch.eye(2))
    assert _torch.direct_call(len) is len


@pytest.mark.skipif(not _torch.has_onednn_linear(), reason="this torch has no oneDNN, or no MKL beside it")
def test_onednn_multiplies() -> None:
    a, w = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    assert torch.equal(_torch.onednn_linear(a, w), a @ w.t())
    assert torch.equal(_torch.onednn_mm(a, w.t()), a @ w.t())
    meta = _torch.onednn_linear(a.to("meta"), w.to("meta"))
    assert meta.shape == (2, 4), "elsewhere it is torch's own product"


def test_stride_free_ops_take_any_layout() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(_torch.stride_free(aten.view.default)(transposed, [6]), transposed.reshape(6))
    assert _torch.stride_free(aten.mm.default) is aten.mm.default


def test_a_library_op_may_have_no_derivative() -> None:
    library = torch.library.Library("private_torch_tests", "DEF")
    kinds = ("CompositeExplicitAutograd", "CPU", "Autograd", "CompositeImplicitAutograd")
    for number, kind in enumerate(kinds):
        library.define(f"op{number}(Tensor x) -> Tensor")
        library.impl(f"op{number}", lambda x: x * x, kind)
    found = [getattr(torch.ops.private_torch_tests, f"op{number}").default for number in range(len(kinds))]
    assert [_torch.has_derivative(op) for op in found] == [False, False, True, True]
    assert _torch.has_derivative(aten.mm.default)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        assert torch.equal(torch.func.grad(lambda x: found[0](x).sum())(torch.ones(2)), torch.zeros(2))  # it is 2


def test_what_runs_under_transforms_can_be_mapped() -> None:
    total, a, b = torch.arange(27.0).view(3, 3, 3)
    op = _torch.under_transforms(aten.addmm_.default)
    mapped = torch.func.vmap(op, in_dims=(None, 0, None))(total, torch.stack([a, b]), b)  # not possible in place
    assert torch.equal(mapped, torch.stack([total + a @ b, total + b @ b]))
    assert _torch.under_transforms(aten.view.default) is _torch.stride_free(aten.view.default)


def test_a_transform_is_seen_from_inside() -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_inside_transform())
        return x.sin()

    f(torch.ones(()))
    torch.func.grad(f)(torch.ones(()))
    torch.func.vmap(f)(torch.ones(2))
    assert seen == [False, True, True] and not _torch.is_inside_transform()


def test_the_fused_adamw_is_adamw() -> None:
    torch.manual_seed(0)
    p, g = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    assert _torch.has_fused_adamw(p) and not _torch.has_fused_adamw(torch.ones(2, dtype=torch.complex64))
    theirs = p.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, foreach=False)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step in (1, 2, 3):
        theirs.grad = g * step
        optimizer.step()
        _torch.fused_adamw_([p], [g * step], [m], [v], torch.tensor(float(step)), 0.1, 0.8, 0.9, 0.3, 1e-6)
    torch.testing.assert_close(p, theirs.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_looks_up_the_two_names_that_are_replaced(reentrant: bool) -> None:
    """Models hold references to torch.utils.checkpoint.checkpoint, so it must find these when it is called."""
    regions: list[str] = []

    @contextmanager
    def region(name: str) -> Iterator[None]:
        regions.append(name)
        yield

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=reentrant)

    with _torch.checkpointing(region):
        assert torch.equal(torch.func.grad(lambda x: call(x).sum())(torch.ones(2)), torch.ones(2).cos())
    assert regions == ["checkpoint"]
    x = torch.ones(2, requires_grad=True)
    call(x).sum().backward()
    assert x.grad is not None and regions == ["checkpoint"]


def test_inductor_compiles_a_graph_without_dynamo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For operands of which each is its own, though they may be one tensor, and strides that are not contiguous."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    copy = graph.call_function(aten.clone.default, (x,))
    graph.output((copy, graph.call_function(aten.sub.Tensor, (x, y))))
    a, b = torch.arange(6.0).reshape(3, 2).t(), torch.ones(3, 2).t()
    run = _torch.compile_by_inductor(torch.fx.GraphModule({}, graph), [a, a])
    assert torch.equal(run(a, a)[1], torch.zeros(2, 3))
    clone, difference = run(a, b)
    assert torch.equal(clone, a) and clone.data_ptr() != a.data_ptr()
    assert torch.equal(difference, a - b)


def test_a_weak_reference_to_a_storage_tells_when_it_is_gone() -> None:
    x = torch.ones(4)
    view, reference = x[1:], _torch.StorageWeakRef(x.untyped_storage())
    del x
    assert not reference.expired(), "the view holds it"
    del view
    assert reference.expired()


def test_who_takes_part_in_a_derivative_or_a_vmap() -> None:
    x, found = torch.ones(2), list[bool]()
    assert not _torch.holds_levels([x, None, 1])
    assert _torch.holds_levels([x, x.clone().requires_grad_()])
    torch.func.grad(lambda y: found.append(_torch.holds_levels([x, y])) or y.sum())(x)
    torch.vmap(lambda y: found.append(_torch.holds_levels([y])) or y)(x)
    torch.func.grad(lambda y: found.append(_torch.holds_levels([x])) or y.sum())(x)
    assert found == [True, True, False], "what a transform only looks on at takes no part"


def test_a_thread_has_objects_of_its_own_and_a_backward_its_callers() -> None:
    own = _torch.of_thread("test", list[str])
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(_torch.of_thread("test", list)))
    thread.start()
    thread.join()
    in_backward_thread(lambda x: found.append(_torch.of_thread("test", list)) or x, torch.ones(1))
    assert _torch.of_thread("test", list) is own
    assert found[0] is not own and found[1] is own


def test_what_a_thread_has_lives_on_when_nobody_else_holds_it() -> None:
    class Held:
        pass

    held = weakref.ref(_torch.of_thread("held", Held))
    gc.collect()
    assert held() is not None and held() is _torch.of_thread("held", Held)


def test_fake_modes_forget_the_shapes_of_a_trace() -> None:

    def add(size: int) -> None:
        with _torch.FakeTensorMode():
            torch.ones(size, 3) + torch.ones(size, 3)

    add(1001)
    known = set(_torch.FakeTensorMode.cache)
    assert known, "fake modes keep no such cache any more"
    with _torch.forgetting_shapes(0):
        add(1002)
        assert set(_torch.FakeTensorMode.cache) > known
    assert set(_torch.FakeTensorMode.cache) == known


def test_a_graph_forgets_names_and_what_was_erased() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    erased = weakref.ref(graph.call_function(torch.neg, (x,)))
    graph.erase_node(erased())  # type: ignore[arg-type]
    gc.collect()
    names = weakref.ref(graph._graph_namespace)
    assert erased() is not None and names() is not None, "graphs forget by themselves now: forget_names can go"
    _torch.forget_names(graph)
    gc.collect()
    assert erased() is None and names() is None
    assert [graph.call_function(torch.neg, (x,)).name for _ in range(2)] == ["neg", "neg_1"], "as before"


def test_torch_writes_an_op_in_simpler_ones() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    softmax = x.softmax(-1)
    formula = _torch.decomposition_of(aten._softmax_backward_data.default)
    assert formula is not None and _torch.decomposition_of(aten.mm.default) is None
    torch.testing.assert_close(
        formula(y, softmax, 1, x.dtype), aten._softmax_backward_data.default(y, softmax, 1, x.dtype)
    )


def test_attention_runs_on_rows_in_pieces() -> None:
    """torch's own kernel for the CPU does not look how its operands lie."""
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = torch.randn(2, 2, 4, 6).mT
    whole, _ = op(*[q.contiguous()] * 3)
    found, _ = _torch.stride_free(op)(q, q, q)
    assert torch.equal(found, whole)


def test_the_timeout_of_all_ranks_is_told() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert _torch.timeout_of_all_ranks() == timedelta(seconds=77)
    finally:
        torch.distributed.destroy_process_group()
