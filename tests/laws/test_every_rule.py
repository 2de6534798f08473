"""Every sharding rule of the registry holds, by `fp.testing.check_rule`.

The quick test has a few samples of the most frequent ops. The slow test traces the samples of torch's own op
tests. Every op with a rule in such a graph is checked on the values that reach it.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator
from typing import Any

import optree
import pytest
import torch
from torch import fx

from functional_parallel.errors import FalseRuleError, UncheckedRuleError
from functional_parallel.ir import aval_of
from functional_parallel.ir.eval_node import eval_node
from functional_parallel.ir.graph import walk_args
from functional_parallel.partitioner.preparation import prepare
from functional_parallel.rules import lookup, registry
from functional_parallel.testing import check_rule
from functional_parallel.tracing import trace

from .test_torchs_ops import DTYPES, MOST_ELEMENTS, OPS, UNDEFINED, is_inexact, is_small, operands, scalar

aten = torch.ops.aten

SAMPLES_OF_AN_OP = 2
CALLS_OF_A_RULE = 3

#: rules of collectives, layouts and draws, which other tests check: check_rule has no axis or key for them; and of
#: memory without defined contents
ELSEWHERE = ("fp.", "aten.empty", "aten.rand", "aten.bernoulli", "aten.normal", "aten.uniform", "aten.native_dropout")


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


INDEX = torch.tensor([0, 5, 2, 2, 4, 1])
ATTENTION = (normal(2, 6, 2, 3), normal(2, 3, 4, 3), normal(2, 3, 4, 2), None, False, None)
FREQUENT: dict[Any, list[Any]] = {
    aten.mm.default: [(normal(6, 6), normal(6, 6))],
    aten.add.Tensor: [(normal(6, 1), normal(6)), (normal(6), 2.0)],
    aten.mul.Tensor: [(normal(6, 1), normal(6))],
    aten.sum.dim_IntList: [(normal(6, 6), [1], True)],
    aten.mean.dim: [(normal(6, 6), [0])],
    aten.amax.default: [(normal(6, 6), [0])],
    aten.embedding.default: [(normal(6, 6), INDEX)],
    aten.gather.default: [(normal(6, 6), 0, INDEX.expand(6, 6))],
    aten.index.Tensor: [(normal(6, 6), [INDEX])],
    aten._softmax.default: [(normal(6, 6), 1, False)],
    aten.native_layer_norm.default: [(normal(6, 6), [6], normal(6), normal(6), 1e-5)],
    aten.cat.default: [([normal(6, 6), normal(6, 6)], 1)],
    aten.view.default: [(normal(6, 6), [2, 3, 6])],
    aten.slice.Tensor: [(normal(6, 12), 1, 0, 6)],
    aten.nll_loss_forward.default: [(normal(6, 6), INDEX, None, 1, 2)],
    torch.ops.fp.attention.default: [ATTENTION],
}
#: with dims of two
OF_TWO = (aten.view.default, torch.ops.fp.attention.default)


@pytest.mark.parametrize("op", FREQUENT, ids=str)
def test_rules_of_frequent_ops(op: Any) -> None:
    """Over three ranks, where the sizes of a sample divide by them; the slow test takes other numbers too."""
    ranks = (2, 3) if op in OF_TWO else (3,)
    assert check_rule(op, FREQUENT[op], ranks=ranks)


@pytest.mark.slow
def test_every_rule_on_the_samples_of_torchs_ops() -> None:
    calls = collected()
    false, unchecked = {}, {}
    for op, samples in sorted(calls.items(), key=lambda pair: str(pair[0])):
        if str(op).startswith(ELSEWHERE):
            continue
        for sample in samples:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    check_rule(op, [sample], ranks=(2, 3, 5), rtol=1e-6)
            except FalseRuleError as error:
                said = str(error)
                if "NaN on both sides" not in said and "TracingError" not in said:  # a refusal is no false result
                    false[str(op)] = said
            except (UncheckedRuleError, ValueError) as error:
                unchecked.setdefault(str(op), str(error))
            else:
                unchecked[str(op)] = ""
    reached = {op for op, why in unchecked.items() if not why}
    rules = {str(op) for op in registry._rules if not str(op).startswith(ELSEWHERE)}
    print(f"{len(reached)} rules of {len(rules)} checked")
    print("not checked:", *sorted(rules - reached - set(map(str, FREQUENT))))
    assert not false, "\n".join(false.values())
    assert len(reached) >= 200


# -----------------------------------------------------------------------------
# Calls of ops that have a rule, collected from graphs
# -----------------------------------------------------------------------------


def collected() -> dict[Any, list[Any]]:
    """Per op with a rule a few calls with different shapes."""
    found: dict[Any, dict[str, Any]] = {}
    for name in sorted(OPS.keys() - UNDEFINED):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for op, call in calls_of(name):
                known = found.setdefault(op, {})
                if len(known) < CALLS_OF_A_RULE:
                    known.setdefault(repr(optree.tree_map(shape_of, call)), call)
    return {op: list(known.values()) for op, known in found.items()}


def calls_of(name: str) -> Iterator[tuple[Any, Any]]:
    op = OPS[name]
    dtypes = [dtype for dtype in DTYPES if dtype in op.supported_dtypes("cpu")]
    torch.manual_seed(0)
    try:
        samples = [sample for sample in op.sample_inputs("cpu", dtypes[0]) if all(map(is_small, operands(sample)))]
    except Exception:
        return
    for sample in samples[:: max(1, len(samples) // SAMPLES_OF_AN_OP)][:SAMPLES_OF_AN_OP]:
        for with_gradient in (False, True):
            try:
                yield from calls_in(op, sample, with_gradient)
            except Exception:
                continue  # a trace refuses the sample, or torch does


def calls_in(op: Any, sample: Any, with_gradient: bool) -> list[tuple[Any, Any]]:
    """The calls in the graph of a sample, or of its gradient, with the values that reach them."""
    leaves, tree = optree.tree_flatten((sample.input, sample.args, sample.kwargs))
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def flat(*tensors: torch.Tensor) -> list[Any]:
        filled = list(leaves)
        for index, x in zip(where, tensors, strict=True):
            filled[index] = x
        input, args, kwargs = tree.unflatten(filled)
        return [x for x in optree.tree_leaves(op(input, *args, **kwargs)) if isinstance(x, torch.Tensor)]

    def gradient(*tensors: torch.Tensor) -> list[Any]:
        moving = tuple(index for index, x in enumerate(tensors) if is_inexact(x))
        return list(torch.func.grad(lambda *inner: scalar(flat(*inner)), moving)(*tensors))

    tensors = [leaves[index].detach() for index in where]
    f = gradient if with_gradient else flat
    traced = prepare(trace(f, [aval_of(x) for x in tensors], forward_only=True))
    known: dict[fx.Node, Any] = dict(zip(traced.inputs, tensors, strict=True))
    found = []
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            known[node] = traced.constants[str(node.target)]
        elif node.op == "call_function":
            args, kwargs = walk_args(
                (node.args, node.kwargs), lambda leaf: known[leaf] if isinstance(leaf, fx.Node) else leaf
            )
            known[node] = eval_node(node.target, args, kwargs)
            is_ours = node.target is not operator.getitem and lookup(node.target) is not None
            if is_ours and not str(node.target).startswith(ELSEWHERE) and is_fit((args, kwargs), known[node]):
                found.append((node.target, (tuple(args), dict(kwargs))))
    return found


def is_fit(call: Any, results: Any) -> bool:
    tensors = [x for x in optree.tree_leaves((call, results)) if isinstance(x, torch.Tensor)]
    return all(
        x.layout is torch.strided and 0 < x.numel() <= MOST_ELEMENTS and not (is_inexact(x) and not x.isfinite().all())
        for x in tensors
    )


def shape_of(leaf: Any) -> Any:
    return aval_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
