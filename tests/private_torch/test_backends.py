"""Each private torch API in `functional_parallel/_torch/backends.py` does what the library relies on."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from functional_parallel import _torch

aten = torch.ops.aten


def test_the_fused_adamw_is_adamw() -> None:
    torch.manual_seed(0)
    p, g = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    rate = torch.tensor(0.1, dtype=torch.float64)
    assert _torch.has_fused_adamw(p, rate) and not _torch.has_fused_adamw(p.to(torch.complex64), rate)
    on_a_device = torch.empty((), device="meta")  # which the kernel would read as float32
    assert not _torch.has_fused_adamw(p, on_a_device) and _torch.has_fused_adamw(p.float(), on_a_device)
    theirs = p.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, foreach=False)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step in (1, 2, 3):
        theirs.grad = g * step
        optimizer.step()
        _torch.fused_adamw_([p], [g * step], [m], [v], torch.tensor(float(step)), rate, 0.8, 0.9, 0.3, 1e-6)
    torch.testing.assert_close(p, theirs.detach(), rtol=1e-12, atol=0)


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


def test_the_timeout_of_all_ranks_is_told() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    try:
        assert _torch.timeout_of_all_ranks() == timedelta(seconds=77)
        _torch.store_of_all_ranks().set("key", "value")
        assert _torch.store_of_all_ranks().get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()
