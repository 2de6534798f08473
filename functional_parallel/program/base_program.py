"""Base class of programs with one graph for all ranks, and of pipeline programs with separate stages per rank."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sharding_specs import Mesh, P

from .explain import Explanation, explain
from .host import HostOp
from .memory_moves import MemoryMove, bytes_of_moves
from .pass_table import PassRecorder, PassTable
from .traffic import Collective, bytes_of, counts_of


@dataclass(eq=False, kw_only=True)
class BaseProgram(abc.ABC):
    """Base class of `Program` and `PipelineProgram`."""

    mesh: Mesh
    in_specs: list[P]
    out_specs: list[P]
    in_paths: list[str]  # pytree paths
    out_paths: list[str]
    name: str  # for messages
    passes: tuple[str, ...] = ()  # names of the passes that ran, in order
    notes: tuple[str, ...] = ()  # lines that `explain` prints below its table
    requests: tuple[str, ...] = ()  # of the transforms, as text
    # Lowers the function again, from shapes, and tells `watch` of the program after each pass.
    lowering: Callable[..., object] | None = field(default=None, repr=False)
    backend: str = "eager"  # one of `BACKENDS`
    cache: dict[str, Any] = field(default_factory=dict, repr=False)  # data that runtimes prepare once

    @abc.abstractmethod
    def collectives(self, *, casts: bool = False) -> list[Collective]:
        """Return the collectives that send data; with `casts`, also the primitives that do not."""

    @abc.abstractmethod
    def moves(self) -> list[MemoryMove]:
        """Return the moves between memories, in order; for a pipeline the moves of all its ranks."""

    @abc.abstractmethod
    def lines(self) -> list[str]:
        """Return the text without source lines. It is equal for two programs if and only if they run the same ops."""

    @abc.abstractmethod
    def host_ops(self) -> list[HostOp]:
        """Return the ops and inputs that involve the host: it waits for the device, or computes in main memory.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh, P
        >>> f = fp.compile(lambda x: torch.linalg.eigvalsh(x).sum(), Mesh(), in_specs=P(), out_specs=P())
        >>> program = f.lower(fp.abstract(torch.eye(3), device="cuda"))
        >>> [(each.op, each.waits) for each in program.host_ops()]
        [('aten._linalg_eigh.default', True)]

        A CUDA graph can hold a program without such ops. The ops with `waits` are the synchronizations of a step.
        """

    @property
    def is_compiled(self) -> bool:
        """Whether inductor compiles the ops between collectives."""
        return self.backend.startswith("inductor")

    @property
    def is_captured(self) -> bool:
        """Whether the program runs as a CUDA graph."""
        return self.backend.endswith("cudagraphs")

    def counts(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Return the number of collectives of each kind, per axes."""
        return counts_of(self.collectives())

    def bytes_sent(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Return the bytes that a rank sends, per kind and axes; for a pipeline the sum over its ranks."""
        return bytes_of(self.collectives())

    def bytes_moved(self) -> dict[tuple[str, str], int]:
        """Return the bytes that move between memories, by source and target; for a pipeline the sum over its ranks.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh, P
        >>> f = fp.compile(lambda x: fp.to_memory(x, "host"), Mesh(), in_specs=P(), out_specs=P(memory="host"))
        >>> f.lower(torch.ones(2)).bytes_moved()
        {('device', 'host'): 8}
        """
        return bytes_of_moves(self.moves())

    def fingerprint(self) -> str:
        """Return a hash of everything that ranks must agree on."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def explain(self, *, group: str = "line", casts: bool = False) -> Explanation | PassTable:
        """Return a table of every collective (kind, axis, count, bytes, source line), or of the effect of each pass.

        Moves between memories are listed after the collectives.

        Args:
            group: "line" for a row per source line, "axis" for one per kind, axis and phase, "pass" for one per pass.
                The rows of passes hold ops, collectives, bytes sent and predicted peak, before and after. For them the
                function is lowered again.
            casts: whether to list primitives that do not communicate too: casts, slices and indices.
        """
        if group == "pass":
            return self._recorded().table(self.name, repr(self.mesh), self.notes)
        found = self.collectives(casts=casts)
        said = {"notes": self.remarks(), "requests": self.requests}
        return explain(self.name, repr(self.mesh), found, self.moves(), group=group, **said)

    def remarks(self) -> tuple[str, ...]:
        return self.notes

    def before(self, name: str) -> str:
        """Return the program's text before a pass ran.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> step = fp.compile(fp.grad(fp.zero(3, "data")(lambda w, x: (x @ w).relu().sum())), Mesh(data=2))
        >>> program = step.lower(torch.ones(4, 4), torch.ones(8, 4))
        >>> program.before("gathers").count("all_gather"), program.after("gathers").count("all_gather")
        (1, 1)

        Args:
            name: the pass, by a name in `explain(group="pass")`; of several with that name, the first. The function is
                lowered again. In a pipeline, a pass that ran on the programs of the stages returns the text of all of
                them.

        Raises:
            ValueError: if no such pass ran.
        """
        return self._recorded(with_text=True).around(name)[0]

    def after(self, name: str) -> str:
        """Return the program's text after a pass ran; of several with that name, the last. See `before`."""
        return self._recorded(with_text=True).around(name)[1]

    def _recorded(self, with_text: bool = False) -> PassRecorder:
        if self.lowering is None:
            raise ValueError(f"{self.name} was not made by fp.compile or fp.train_step, so its passes are not known")
        recording = PassRecorder(with_text)
        self.lowering(watch=recording.add)
        return recording
