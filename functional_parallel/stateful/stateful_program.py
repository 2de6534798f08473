"""Programs of a function of values that stay on the ranks between calls, such as parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import optree

from ..errors import LayoutError
from ..functions import PyTree
from ..ir import leaf_signature
from ..lowering import Lowered
from ..pipelines import PipelineProgram
from ..program import Explanation, PassTable, Program
from ..runtime import Runtime, arrived, copy_if_aliased
from ..tracing import ProgramCache, disable_ambient_modes


class StatefulProgram:
    """Programs of a function by the layout of what stays on the ranks and the signature of the other arguments.

    Args:
        name: the name of the function, for messages.
        ready: what to do before `explain`, for its error.

    Attributes:
        program: the last program used; None before the first call.
    """

    def __init__(self, name: str, ready: str) -> None:
        self.name, self.ready = name, ready
        self.program: Program | PipelineProgram | None = None
        self._lowered: dict[Hashable, ProgramCache[Lowered]] = {}

    def lower(self, args: PyTree, layout: Hashable, trace: Callable[[], Lowered], *, exact: bool = False) -> Lowered:
        """Return the program for arguments and a layout, by `trace` if it is new; `exact` as for `leaf_signature`."""
        leaves, tree = optree.tree_flatten(args)
        programs = self._lowered.setdefault(layout, ProgramCache(self.name))
        lowered = programs.get((tree, tuple(leaf_signature(leaf, exact) for leaf in leaves)), trace)
        self.program = lowered.program
        return lowered

    def explain(self, group: str = "line", casts: bool = False) -> Explanation | PassTable:
        """Return every collective of the last program: kind, axis, count, bytes, source line."""
        if self.program is None:
            raise LayoutError(f"{self.name} has not run yet: {self.ready}")
        return self.program.explain(group=group, casts=casts)

    def run(
        self,
        runtime: Runtime[Any, Any],
        lowered: Lowered,
        handles: list[Any],
        batch: Sequence[Any] = (),
        whose: str = "",
        *,
        staying: slice = slice(0),
        kept: Collection[int] | None = None,
    ) -> list[Any]:
        """Run a program. Return the handles of the results that stay on the ranks, and the others as full tensors.

        Handles may be `PendingMove`s, if `kept` is None.

        Args:
            runtime, lowered, handles: the runtime, the program and its inputs.
            batch, whose: as for `Runtime.run`.
            staying: the results that stay on the ranks.
            kept: storages of inputs. Results must not share memory with them, or each other; None if the program takes
                care of it.
        """
        with disable_ambient_modes():
            results = runtime.run(lowered.program, handles, batch, whose)
        taken = set(kept or ())
        stays = range(len(results))[staying]
        for index in stays if kept is not None else ():
            results[index] = copy_if_aliased(arrived(results[index]), taken)
        specs = lowered.program.out_specs
        for index in (*range(stays.start), *range(stays.stop, len(results))):
            full = runtime.whole(results[index], specs[index])
            results[index] = full if kept is None else copy_if_aliased(full, taken)
        return results
