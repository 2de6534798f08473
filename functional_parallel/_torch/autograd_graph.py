"""Edges of autograd's graph between tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def sources_of_gradients(result: torch.Tensor, tensors: Sequence[torch.Tensor], since: int) -> list[int]:
    """Return the numbers of the tensors that receive a gradient from a result.

    All autograd nodes in between have a number of `since` or more. See `next_node_number`.
    """
    with torch._C.DisableTorchFunction():
        leaves = {id(tensor): index for index, tensor in enumerate(tensors) if tensor.grad_fn is None}
        nodes = [tensor.grad_fn for tensor in tensors]  # holds them, so that their ids are not reused
        edges = {
            (id(node), tensor.output_nr): index
            for index, (node, tensor) in enumerate(zip(nodes, tensors, strict=True))
            if node is not None
        }
        pending: list[Any] = [(result.grad_fn, result.output_nr)] if result.grad_fn is not None else []
    seen: set[Any] = set()
    found: set[int] = set()
    while pending:
        node, number = pending.pop()
        if hasattr(node, "variable"):
            found.update({leaves[id(node.variable)]} if id(node.variable) in leaves else ())
        elif node._sequence_nr() < since:
            found.update({edges[id(node), number]} if (id(node), number) in edges else ())
        elif node not in seen:
            seen.add(node)
            pending += [edge for edge in node.next_functions if edge[0] is not None]
    return sorted(found)
