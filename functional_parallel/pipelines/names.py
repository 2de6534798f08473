"""Values of a step as names that link the inputs and outputs of a pipeline's programs.

The programs are copies of pieces of the step's graph. Afterwards the graph of the step and the graph of the epilogue
serve only to identify values and to store their shape and dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from torch import fx

from ..ir import forget_rewrites

if TYPE_CHECKING:
    from .program import PipelineProgram

__all__ = ["forget_ops", "names_in"]


def names_in(program: PipelineProgram) -> set[fx.Node]:
    """Return the nodes that name inputs and outputs of a pipeline's programs."""
    return set(_names(program))


def _names(program: PipelineProgram) -> Iterator[fx.Node]:
    yield from program.inputs
    yield from program.collected
    for prologue in program.prologues:
        yield from prologue.inputs
        yield from (node for node, _ in prologue.outputs)
    for stage in program.stages:
        yield from (*stage.sends_forward, *stage.sends_backward, *stage.after_forward, *stage.after_input)
        for work in stage.works.values():
            yield from work.totals
            for part in (work.first, work.following, *work.totals.values()):
                yield from (*part.inputs, *part.outputs)
    epilogue = program.epilogue
    for node, given in epilogue.given.items():
        yield from (node, given.node)
    for level in epilogue.parts:
        for part in level.values():
            yield from (*part.inputs, *part.outputs)
    yield from (exchange.node for level in epilogue.exchanges for exchange in level)
    yield from (*epilogue.outputs, *epilogue.replaces, *epilogue.replaces.values())


def forget_ops(names: Collection[fx.Node]) -> None:
    """Erase all other nodes from the graphs of `names`, and clear the operands of the named nodes."""
    for graph in {node.graph for node in names}:
        for node in reversed(list(graph.nodes)):
            node.args, node.kwargs = (), {}
            if node not in names:
                graph.erase_node(node)
        forget_rewrites(graph)
