"""Values of a step as names: by which a pipeline's programs say what they take from each other.

The programs are cut out of the graph of the whole step, and copied. Of that graph, and of the one of all that comes
after the pipeline, nothing is asked any more but which value is which, and what it looks like.
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
    """The values by which a pipeline's programs know each other's."""
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
    """Drop what computes these values, and all other values, from their graphs."""
    for graph in {node.graph for node in names}:
        for node in reversed(list(graph.nodes)):
            node.args, node.kwargs = (), {}
            if node not in names:
                graph.erase_node(node)
        forget_rewrites(graph)
