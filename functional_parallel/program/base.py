"""What every program is and can be asked, whether its ranks run the same or, in a pipeline, each its own stages."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sharding_specs import Mesh, P

from .collectives import Collective, bytes_of, counts_of
from .explain import Explanation, explain
from .pass_table import Intermediate, PassRecorder, PassTable

__all__ = ["BaseProgram"]


@dataclass(eq=False, kw_only=True)
class BaseProgram(abc.ABC):
    """The common part of `Program` and `PipelineProgram`.

    Attributes:
        mesh: the mesh it is for.
        in_specs, out_specs: how each input and result lies.
        in_paths, out_paths: their pytree paths.
        name: for messages.
        passes: the names of the rewrites that ran, in order.
        notes: lines that `explain` prints below its table.
        lowering: lowers the function again, from shapes, and yields the program after each pass.
        backend: what computes between collectives: "eager", torch's kernels op by op, or "inductor".
    """

    mesh: Mesh
    in_specs: list[P]
    out_specs: list[P]
    in_paths: list[str]
    out_paths: list[str]
    name: str
    passes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lowering: Callable[[], Iterable[Intermediate]] | None = field(default=None, repr=False)
    backend: str = "eager"
    cache: dict[str, Any] = field(default_factory=dict, repr=False)  # what runtimes prepare, once

    @abc.abstractmethod
    def collectives(self, *, casts: bool = False) -> list[Collective]:
        """The collectives that send something; with `casts`, also the primitives that send nothing."""

    @abc.abstractmethod
    def lines(self) -> list[str]:
        """The text without source lines: equal for two programs exactly when they do the same."""

    def counts(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """How many collectives of each kind, per axes."""
        return counts_of(self.collectives())

    def bytes_sent(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Bytes that one rank sends, per kind and axes; for a pipeline the sum over its ranks."""
        return bytes_of(self.collectives())

    def fingerprint(self) -> str:
        """A hash of everything that ranks must agree on."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def explain(self, *, group: str = "line", casts: bool = False) -> Explanation | PassTable:
        """A table of every collective: kind, axis, count, bytes, source line; or of what each pass did.

        Args:
            group: "line" for a row per source line, "axis" for one per kind, axis and phase; "pass" for one per pass:
                ops, collectives, bytes sent and predicted peak, before and after. For that the program is traced anew.
            casts: whether to list what communicates nothing too: casts, slices and indices.
        """
        if group == "pass":
            return self._recorded().table(self.name, repr(self.mesh), self.notes)
        found = self.collectives(casts=casts)
        return explain(self.name, repr(self.mesh), found, group=group, notes=self.remarks())

    def remarks(self) -> tuple[str, ...]:
        """What `explain` prints below its table of collectives."""
        return self.notes

    def before(self, name: str) -> str:
        """The program's text before a pass ran, by one of the names in `explain(group="pass")`.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> step = fp.compile(fp.grad(fp.zero(3, "data")(lambda w, x: (x @ w).relu().sum())), Mesh(data=2))
        >>> program = step.lower(torch.ones(4, 4), torch.ones(8, 4))
        >>> program.before("gathers").count("all_gather"), program.after("gathers").count("all_gather")
        (1, 1)

        Args:
            name: the pass; of several of that name the first. The program is traced anew to tell. In a pipeline, a
                pass that ran on the programs of the stages gives the text of all of them.

        Raises:
            ValueError: when no such pass ran.
        """
        return self._recorded(with_text=True).around(name)[0]

    def after(self, name: str) -> str:
        """The program's text after a pass ran; of several of that name the last. See `before`."""
        return self._recorded(with_text=True).around(name)[1]

    def _recorded(self, with_text: bool = False) -> PassRecorder:
        if self.lowering is None:
            raise ValueError(f"{self.name} was not made by fp.compile or fp.train_step, so its passes are not known")
        recording = PassRecorder(with_text)
        for each in self.lowering():
            recording.add(each)
        return recording
