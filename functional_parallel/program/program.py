"""The program itself: the graph with its mesh, its specs, and what can be asked of it before it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sharding_specs import Mesh, P

from ..tracing import Traced
from .collectives import Collective, bytes_of, collectives_of, counts_of
from .explain import Explanation, explain
from .memory import Memory, memory_of
from .rewrites import PassTable, Recording
from .text import canonical_lines, program_text

__all__ = ["Program"]


@dataclass(eq=False)
class Program:
    """What one rank runs: the same on all, at local shapes.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> step = fp.compile(fp.data_parallel("data")(lambda w, x: (x @ w).sum()), Mesh(data=2))
    >>> program = step.lower(torch.ones(3), torch.ones(4, 3))
    >>> program.counts()
    {('psum', ('data',)): 1}
    >>> print(str(program).splitlines()[-1])
    return 'result' = h3

    Attributes:
        traced: the graph.
        mesh: the mesh it is for.
        in_specs, out_specs: how each input and result lies.
        in_paths, out_paths: their pytree paths.
        name: for messages.
        passes: the names of the rewrites that ran, in order.
        notes: lines that `explain` prints below its table.
        restage: makes the program once more, from shapes; its argument `watch` looks on.
        backend: what computes between collectives: "eager", torch's kernels op by op, or "inductor".
    """

    traced: Traced
    mesh: Mesh
    in_specs: list[P]
    out_specs: list[P]
    in_paths: list[str]
    out_paths: list[str]
    name: str
    passes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    restage: Callable[..., Any] | None = field(default=None, repr=False)
    backend: str = "eager"
    cache: dict[str, Any] = field(default_factory=dict, repr=False)  # what runtimes prepare, once

    def collectives(self, *, casts: bool = False) -> list[Collective]:
        """The collectives that send something, in order; with `casts`, also the primitives that send nothing."""
        return list(collectives_of(self.traced, self.mesh, casts=casts))

    def counts(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """How many collectives of each kind, per axes."""
        return counts_of(self.collectives())

    def bytes_sent(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Bytes that one rank sends, per kind and axes."""
        return bytes_of(self.collectives())

    def explain(self, *, group: str = "line", casts: bool = False) -> Explanation | PassTable:
        """A table of every collective: kind, axis, count, bytes, source line; or of what each pass did.

        Args:
            group: "line" for a row per source line, "axis" for one per kind, axis and phase; "pass" for one per pass:
                ops, collectives, bytes sent and predicted peak, before and after. For that the program is traced anew.
            casts: whether to list what communicates nothing too: casts, slices and indices.
        """
        if group == "pass":
            return PassTable(self.name, repr(self.mesh), tuple(self._recorded().rows()), self.notes)
        return explain(self.name, repr(self.mesh), self.collectives(casts=casts), group=group, notes=self.notes)

    def memory(self) -> Memory:
        """Bytes of live tensors on one rank, op by op, exactly: the peak, the curve, what is alive at the peak.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> step = fp.compile(fp.data_parallel("data")(lambda w, x: (x @ w).relu().sum()), Mesh(data=2))
        >>> memory = step.lower(torch.ones(4, 4), torch.ones(8, 4)).memory()
        >>> memory.peak                       # w and half of x, their product, and relu's result: 4 · 16 · 4 bytes
        256
        """
        return memory_of(self.name, self.traced)

    def before(self, name: str) -> str:
        """The program's text before a pass ran, by one of the names in `explain(group="pass")`.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> step = fp.compile(fp.grad(fp.zero(3, "data")(lambda w, x: (x @ w).relu().sum())), Mesh(data=2))
        >>> program = step.lower(torch.ones(4, 4), torch.ones(8, 4))
        >>> program.before("gathers").count("all_gather"), program.after("gathers").count("all_gather")
        (1, 1)

        Args:
            name: the pass; of several of that name the first. The program is traced anew to tell.

        Raises:
            ValueError: when no such pass ran.
        """
        return self._recorded(with_text=True).around(name)[0]

    def after(self, name: str) -> str:
        """The program's text after a pass ran; of several of that name the last. See `before`."""
        return self._recorded(with_text=True).around(name)[1]

    def _recorded(self, with_text: bool = False) -> Recording:
        if self.restage is None:
            raise ValueError(f"{self.name} was not made by fp.compile or fp.train_step, so its passes are not known")
        recording = Recording(with_text)
        self.restage(watch=recording)
        return recording

    def lines(self) -> list[str]:
        """The program's text without source lines: equal for two programs exactly when they do the same."""
        backend = [] if self.backend == "eager" else [f"backend {self.backend}"]  # which rounds in ways of its own
        return [
            f"mesh {self.mesh!r}",
            *backend,
            *canonical_lines(self.traced, self.mesh, self._in_names(), self._out_names()),
        ]

    def fingerprint(self) -> str:
        """A hash of everything that ranks must agree on."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()

    def __str__(self) -> str:
        text = program_text(self.traced, self.mesh, self._in_names(), self._out_names())
        return f"{self.name} on {self.mesh!r}\n{text}"

    def _in_names(self) -> list[str]:
        paths = [path or f"argument {index}" for index, path in enumerate(self.in_paths)]
        return [_lying(path, spec) for path, spec in zip(paths, self.in_specs, strict=True)]

    def _out_names(self) -> list[str]:
        return [_lying(path or "result", spec) for path, spec in zip(self.out_paths, self.out_specs, strict=True)]


def _lying(path: str, spec: P) -> str:
    return repr(path) if spec == P() else f"{path!r} as {spec!r}"
