"""Each private torch API in `functional_parallel/_torch/fakes.py` does what the library relies on."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from functional_parallel import _torch


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


def test_torch_logs_what_fails_on_fake_tensors_unless_told_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    with _torch.FakeTensorMode():
        x = torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="reduction dim"), _torch.unlogged_fakes():
            x @ x
        assert not caplog.records
        fakes = logging.getLogger("torch._subclasses.fake_tensor")
        fakes.addHandler(caplog.handler)
        try:
            with pytest.raises(RuntimeError, match="reduction dim"):
                x @ x
        finally:
            fakes.removeHandler(caplog.handler)
        assert [record.name for record in caplog.records][:1] == [fakes.name]


def test_a_weak_reference_to_a_storage_tells_when_it_is_gone() -> None:
    x = torch.ones(4)
    view, reference = x[1:], _torch.StorageWeakRef(x.untyped_storage())
    del x
    assert not reference.expired(), "the view holds it"
    del view
    assert reference.expired()


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


def test_a_fake_that_its_mode_has_forgotten_can_be_put_in_anothers_place() -> None:
    """As a module does that is cast; a mode's own weak reference to it stands against that."""
    mode = _torch.FakeTensorMode()
    with mode:
        x = torch.empty(2)
        y = x.half() + 1
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(x, y)
    _torch.forget_fakes(mode)
    torch.utils.swap_tensors(x, y)
    assert x.dtype == torch.float16 and y.dtype == torch.float32
