"""Find the op with a wrong value under a plan: let the function return all intermediate values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import fx

from sharding_specs import Mesh

from ..compile import compile
from ..errors import NotEquivalentError
from ..functions import PyTree, filled
from ..ir import Traced, at_source, aval_of, eval_node, grad_mode_of, info, source_of, walk_args, where
from ..partitioner import prepare
from ..tracing import trace
from .compare import compare


def first_differing_op(
    loss: Callable[..., PyTree],
    plan: Callable[..., PyTree],
    mesh: Mesh,
    args: tuple[PyTree, ...],
    what: str,
    *,
    exact: bool,
    rtol: float | None,
) -> str:
    traced = prepare(traced_leaves(loss, args))
    ops = [node for node in traced.nodes if not isinstance(info(node).val, tuple) and not _is_uninitialised(node)]

    def values(*args: PyTree) -> list[torch.Tensor]:
        return _values(traced, ops, args)

    wanted = values(*args)
    try:
        found = compile(plan(values), mesh)(*args)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"\nThe first op that differs is unknown, because the plan refuses to return values of ops: {error}"
    for node, mine, right in zip(ops, found, wanted, strict=True):
        try:
            compare(mine, right.to(mine.dtype), "", exact=exact, rtol=rtol)  # a plan may use another dtype on purpose
        except NotEquivalentError as error:
            source = source_of(node)
            line = "" if source is None else f" ({source.text})"
            advice = "All earlier values are right: check this op's rule, or the dtype that the plan computes it in"
            return f"\nIt begins with {where(node)}{line}{error}. {advice}"
    advice = "so a derivative is wrong: check rules with a `local`"
    return f"\nThe {len(ops)} values before the loss are right, {advice}" if what == "gradient" else ""


def _is_uninitialised(node: fx.Node) -> bool:
    return "empty" in getattr(node.target, "__name__", "")


def traced_leaves(loss: Callable[..., PyTree], args: tuple[PyTree, ...]) -> Traced:
    leaves, tree = optree.tree_flatten(args)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def flat(*values: torch.Tensor) -> list[Any]:
        return list(optree.tree_leaves(loss(*filled(leaves, tensors, values, tree))))

    return trace(flat, [aval_of(leaves[index]) for index in tensors], forward_only=True)


def _values(traced: Traced, ops: list[fx.Node], args: tuple[PyTree, ...]) -> list[torch.Tensor]:
    tensors = (leaf for leaf in optree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
    known: dict[fx.Node, Any] = dict(zip(traced.inputs, tensors, strict=True))
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            known[node] = traced.constants[str(node.target)]
        elif node.op == "call_function":
            at = lambda leaf: known[leaf] if isinstance(leaf, fx.Node) else leaf  # noqa: E731
            with at_source(source_of(node)), grad_mode_of(node):
                known[node] = eval_node(node.target, *walk_args((node.args, node.kwargs), at))
    return [known[node] for node in ops]
