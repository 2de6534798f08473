"""An optimizer composed of two, as a user writes it: the same steps, and a warning where its state is replicated."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..trees import assert_close

ADAMW, SGD = fp.optim.adamw(1e-2), fp.optim.sgd(1e-1, momentum=0.9)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ params["w"]) @ params["v"]).square().sum()


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 4, generator=generator, dtype=torch.float64) for name in "wv"}


def of(tree: Any, name: str) -> dict[str, Any]:
    return {name: tree[name]}


def init(params: Any) -> Any:
    return {"first": ADAMW.init(of(params, "w")), "second": SGD.init(of(params, "v"))}


def update(grads: Any, state: Any, params: Any, *_: Any) -> Any:
    w, first = ADAMW.update(of(grads, "w"), state["first"], of(params, "w"))
    v, second = SGD.update(of(grads, "v"), state["second"], of(params, "v"))
    return {**w, **v}, {"first": first, "second": second}


def specs(params: Any, specs: Any) -> Any:
    adamw = ADAMW.init(of(params, "w"))._replace(step=P(), mean=of(specs, "w"), square=of(specs, "w"))
    return {"first": adamw, "second": SGD.init(of(params, "v"))._replace(step=P(), velocity=of(specs, "v"))}


def trained(optimizer: fp.optim.Optimizer, mesh: Mesh, plan: Any) -> tuple[Any, Any]:
    train = fp.train_step(loss, optimizer, mesh, plan)
    state = train.init(parameters())
    for _ in range(3):
        state, _ = train(state, torch.ones(4, 4).double())
    return train.whole(state), train.program


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_replicated_state_is_reported(stage: int) -> None:
    """The warning names ZeRO, the state and the reason, not an op of the library."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found, program = trained(fp.optim.Optimizer(init, update), Mesh(data=2), fp.zero(stage, "data"))
    assert [(each.category, each.filename) for each in seen] == [(fp.PartitionWarning, __file__)]
    text = str(seen[0].message)
    for part in ("ZeRO has no effect on this optimizer's state", "every rank along 'data' holds all 384 bytes"):
        assert part in text
    for part in ("first/1/w, first/2/w, second/1/v", "structure of all parameters", "`specs=`"):
        assert part in text
    assert not any(
        spec.axes for path, spec in zip(program.in_paths, program.in_specs, strict=True) if "0/1" in path[:3]
    )
    assert_close(found, trained(fp.optim.Optimizer(init, update), Mesh(), None)[0])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_fix_that_it_names(stage: int) -> None:
    optimizer = fp.optim.Optimizer(init, update, specs)
    found, program = trained(optimizer, Mesh(data=2), fp.zero(stage, "data"))
    split = [path for path, spec in zip(program.in_paths, program.in_specs, strict=True) if "data" in spec.axes]
    assert {"0/1/first/1/w", "0/1/first/2/w", "0/1/second/1/v"} <= set(split)
    assert_close(found, trained(optimizer, Mesh(), None)[0])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_full_trees_are_sharded_without_a_warning(stage: int) -> None:
    """Both optimizers over all parameters, and a choice by name."""

    def both(params: Any) -> Any:
        return {"first": ADAMW.init(params), "second": SGD.init(params)}

    def chosen(grads: Any, state: Any, params: Any) -> Any:
        w, first = ADAMW.update(grads, state["first"], params)
        v, second = SGD.update(grads, state["second"], params)
        return {**of(w, "w"), **of(v, "v")}, {"first": first, "second": second}

    optimizer = fp.optim.Optimizer(both, chosen)
    found, _ = trained(optimizer, Mesh(data=2), fp.zero(stage, "data"))
    assert_close(found, trained(optimizer, Mesh(), None)[0])
