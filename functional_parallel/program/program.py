"""The class `Program`: a graph with its mesh, its specs, and predictions of its cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from sharding_specs import Mesh, P

from ..ir import Traced, canonical_lines, collective_call, operands_of, program_text
from ..ops import attention_notes
from . import extra_memory
from .base_program import BaseProgram
from .hardware import Hardware, hardware_of
from .host import HostOp, host_ops
from .memory import MemoryUse, memory_of, with_copies
from .memory_moves import MemoryMove, moves_of
from .price import Price, price_of
from .traffic import Collective, collectives_of


@dataclass(eq=False)
class Program(BaseProgram):
    """A program that all ranks run, at local shapes.

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
    """

    traced: Traced

    def copy(self) -> tuple[Program, dict[fx.Node, fx.Node]]:
        """Copy the program, for a tentative rewrite. Also return the copy of each node."""
        traced, copies = self.traced.copy()
        return replace(self, traced=traced, cache={}), copies

    def collectives(self, *, casts: bool = False) -> list[Collective]:
        """Return the collectives that send data, in order; with `casts`, also the primitives that do not."""
        return list(collectives_of(self.traced, self.mesh, casts=casts))

    def moves(self) -> list[MemoryMove]:
        return list(moves_of(self.traced))

    def host_ops(self) -> list[HostOp]:
        return host_ops(self.traced)

    def memory(self, rank: int | None = None) -> MemoryUse:
        """Compute the bytes of live tensors on one rank, op by op, exactly: peak, curve, and values at the peak.

        Ranks differ only if one of them holds what others do not, as the master of `fp.data_parallel(master=…)` does.
        Memory inside kernels, and rounding and fragmentation of the allocator, are not predicted.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> step = fp.compile(fp.data_parallel("data")(lambda w, x: (x @ w).relu().sum()), Mesh(data=2))
        >>> memory = step.lower(torch.ones(4, 4), torch.ones(8, 4)).memory()
        >>> memory.peak                       # w and half of x, their product, and relu's result: 4 · 16 · 4 bytes
        256

        Args:
            rank: the rank; None for the one that holds most.

        Raises:
            ValueError: if the mesh has no such rank.
        """
        shared = extra_memory.current().of_collectives(self.collectives(), self.mesh)
        returned = [spec.memory for spec in self.out_specs]
        memory = replace(memory_of(self.name, self.traced, self.absent(rank), returned), shared=shared)
        return with_copies(memory, self.traced) if self.is_captured else memory

    def absent(self, rank: int | None) -> frozenset[fx.Node]:
        """Return the values that a rank does not hold, because another rank owns them. None is a rank with all."""
        if rank is None:
            return frozenset()
        if rank not in self.mesh.ranks:
            raise ValueError(f"{self.mesh!r} has ranks 0 … {self.mesh.size - 1}, not {rank!r}")
        return _absent_values(self.traced, self.in_specs, self.mesh, rank)

    def price(self, hardware: Hardware | str = "h100") -> Price:
        """Predict the cost of a step on a machine: seconds by op, bytes sent and memory per rank. Nothing runs.

        The time and memory of the prediction do not grow with the mesh, which may have many thousands of ranks.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh
        >>> w, x = torch.empty(16384, 1024, device="meta"), torch.empty(1 << 20, 16384, device="meta")
        >>> step = fp.compile(fp.grad(fp.zero(3, "data")(lambda w, x: (x @ w).square().mean())), Mesh(data=16384))
        >>> price = step.lower(w, x).price("h100")
        >>> price.mesh.size, price.sent == 2 * 4 * 1024 * 16383  # one gather, one reduce-scatter
        (16384, True)

        Args:
            hardware: "h100", "a100", "v100", or an `fp.Hardware` that describes another machine.

        Returns:
            The price; print it for a table.
        """
        described = hardware_of(hardware)
        return price_of(self.name, self.traced, self.mesh, described, self.memory().peak, self.notes)

    def remarks(self) -> tuple[str, ...]:
        return (*self.notes, *attention_notes(self.traced))

    def lines(self) -> list[str]:
        """Return the program's text without source lines. It is equal exactly for programs that run the same ops."""
        backend = [] if self.backend == "eager" else [f"backend {self.backend}"]  # another backend rounds differently
        return [
            f"mesh {self.mesh!r}",
            *backend,
            *canonical_lines(self.traced, self.mesh, self._in_names(), self._out_names()),
        ]

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


def has_owner(specs: Sequence[P], mesh: Mesh) -> bool:
    return any(mesh.axis_size(axis) > 1 for spec in specs for axis in spec.owner)


def _absent_values(traced: Traced, specs: Sequence[P], mesh: Mesh, rank: int) -> frozenset[fx.Node]:
    """Return the values that a rank does not hold: an op on a value of an owner runs on the owner only."""
    coordinates = mesh.coordinates(rank)
    found = {
        node
        for node, spec in zip(traced.inputs, specs, strict=True)
        if any(coordinates[axis] != owner for axis, owner in spec.owner.items())
    }
    for node in traced.nodes:
        if call := collective_call(node, "gather", "reduce"):
            is_absent = coordinates[call.axes[0]] != call.owner
        else:
            is_absent = not (collective_call(node, "broadcast", "scatter") or found.isdisjoint(operands_of(node)))
        if is_absent:
            found.add(node)
    return frozenset(found)
