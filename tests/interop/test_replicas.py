"""`torch.nn.parallel` as functions: the teaching case, gradients, uneven chunks, pytrees, and what is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import functional_parallel as fp
from functional_parallel import interop
from sharding_specs import Mesh


def teaching_case() -> tuple[nn.Module, torch.Tensor]:
    """l2(l1(x)) with weights 1, and a batch of 6 whose pairs have the sums of the published case."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    pairs = [(-1.2, -1.2735), (-0.4, -0.4349), (-1.6, -1.7222)]
    return model, torch.tensor([number for pair in pairs for number in pair]).double()[:, None]


def test_the_gradient_of_the_batch_is_the_sum_of_the_replicas_gradients() -> None:
    """By autograd: each replica's own gradient can be looked at, and the master has their sum."""
    model, x = teaching_case()
    replicas = interop.replicate(model, 3)
    for replica in replicas:
        replica.tensors["0.weight"].retain_grad()
    interop.gather(interop.parallel_apply(replicas, interop.scatter(x, 3))).sum().backward()
    own = [replica.tensors["0.weight"].grad for replica in replicas]
    assert [round(gradient.item(), 4) for gradient in own] == [-2.4735, -0.8349, -3.3222]
    whole = model[0].weight.grad
    assert whole.item() == pytest.approx(-6.6305, abs=2e-4) and torch.allclose(whole, sum(own))
    model.zero_grad()
    model(x).sum().backward()
    assert torch.allclose(whole, model[0].weight.grad)


def test_the_same_by_pure_functions_and_as_a_plan() -> None:
    """By torch.func, the gradient by all replicas at once; and a program with a master, on simulated ranks."""
    model, x = teaching_case()
    fn, params = fp.functional(model)

    def loss_of(replicas: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        functions = [lambda part, own=own: fn(own, part) for own in replicas]
        return interop.gather(interop.parallel_apply(functions, interop.scatter(x, 3))).sum()

    own = fp.grad(loss_of)(interop.replicate(params, 3))
    whole = fp.grad(lambda params: loss_of(interop.replicate(params, 3)))(params)
    plan = fp.data_parallel("data", master=0)
    step = fp.compile(fp.grad(plan(lambda params, x: fp.outputs(fn(params, x)).sum())), Mesh(data=3))
    for name, gradient in step(params, x).items():
        assert torch.allclose(gradient, sum(each[name] for each in own))
        assert torch.allclose(gradient, whole[name])


def test_detached_replicas_send_no_gradient_back() -> None:
    w = torch.ones(2, requires_grad=True)
    attached, detached = (interop.replicate({"w": w}, 2, detach=detach)[1]["w"] for detach in (False, True))
    assert attached.requires_grad and not detached.requires_grad
    assert len({each.data_ptr() for each in (w, attached, detached)}) == 3


class Pair(NamedTuple):
    x: Any
    named: Any


@given(rows=st.integers(1, 12), ranks=st.integers(1, 5), dim=st.integers(0, 1))
def test_chunks_are_torchs_and_are_gathered_again(rows: int, ranks: int, dim: int) -> None:
    x = torch.arange(rows * rows).reshape(rows, rows)
    chunks = interop.scatter(Pair(x, {"y": [x + 1], "n": 3}), ranks, dim)
    assert [chunk.x.shape for chunk in chunks] == [part.shape for part in x.chunk(ranks, dim)]
    assert all(isinstance(chunk, Pair) and chunk.named["n"] == 3 for chunk in chunks)
    found = interop.gather(chunks, "cpu", dim)
    assert torch.equal(found.x, x) and torch.equal(found.named["y"][0], x + 1) and found.named["n"] == 3


def test_devices_may_be_named_and_inputs_may_have_keywords() -> None:
    replicas = interop.replicate(nn.Linear(2, 1), ["cpu", torch.device("cpu")])
    inputs, named = interop.scatter((torch.ones(4, 2),), ["cpu", "cpu"]), [{}, {}]
    assert interop.gather(interop.parallel_apply(replicas, inputs, named), "cpu").shape == (4, 1)


def test_buffers_are_replicated_too() -> None:
    norm = nn.BatchNorm1d(2)
    (replica,) = interop.replicate(norm, 1)
    replica(torch.randn(4, 2))
    assert replica.tensors["num_batches_tracked"] == 1 and norm.num_batches_tracked == 0


REFUSED = {
    "no device": (lambda: interop.replicate({}, 0), "1 or more"),
    "a name": (lambda: interop.scatter(torch.ones(2), "cpu"), "give a list of devices"),
    "a scalar": (lambda: interop.scatter({"lr": torch.tensor(1.0)}, 2), "lr has no such dim"),
    "unequal lengths": (lambda: interop.scatter((torch.ones(4), torch.ones(1)), 2), "0: 4, 1: 1 do not give 2"),
    "too few inputs": (lambda: interop.parallel_apply([abs, abs], [1]), r"replicas\[:1\]"),
    "no outputs": (lambda: interop.gather([]), "there are no outputs"),
    "other keys": (lambda: interop.gather([{"a": torch.ones(1)}, {"b": torch.ones(1)}]), "output 1 has the structure"),
    "unequal numbers": (lambda: interop.gather([{"n": 1}, {"n": 2}]), "n is 1, 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        call()


def test_replicas_of_a_tree_keep_what_is_not_a_tensor() -> None:
    assert optree.tree_leaves(interop.replicate({"w": torch.ones(1), "steps": 3}, 1))[0] == 3
