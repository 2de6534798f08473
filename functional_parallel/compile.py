"""From a local function to a program that runs: trace at local shapes, type, check the results, hand to a runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, broadcast_specs, tree_paths

from .assumptions import Assumption, Programs, assumed
from .by_place import by_place
from .collectives import guards
from .collectives.axes import bind
from .collectives.types import CollectiveTypeError, State, Type
from .declared import declared_type, say_specs
from .leftovers import leaving_nothing
from .local_function import Layout, LocalFunction, PyTree, SpecTree, layout_of
from .microbatches import local_aval, parts_of
from .pipelines import PipelineError, PipelineProgram
from .program import Program, drop_trivial
from .rewrite import rewrite
from .runtime import PipelineRuntime, check_backend, default_runtime, pipeline_memory
from .source import current_source
from .tracing import forget_values, hollow, simplify, trace
from .tracing.record import recorder
from .varying import Typing, type_of

__all__ = ["UNCHECKED", "Compiled", "LayoutError", "OutSpecError", "compile", "runtime_of", "shard_map", "stage"]


class LayoutError(ValueError):
    """A function whose arguments' layout nobody declared, or declared twice."""


class OutSpecError(CollectiveTypeError):
    """Results that do not lie as their specs say; lists every one."""


def compile(
    f: Callable[..., PyTree],
    mesh: Mesh,
    *,
    in_specs: Any = None,
    out_specs: Any = None,
    name: str | None = None,
    bucket: int | str | None = None,
    without: Collection[str] = (),
    backend: str = "eager",
) -> Compiled:
    """Compile a function on shards into a program for a mesh; whole tensors in, whole tensors out.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> step = fp.compile(lambda x: fp.psum(x.sum(), "data"), Mesh(data=2), in_specs=P("data"), out_specs=P())
    >>> step(torch.arange(4.0))
    tensor(6.)

    Args:
        f: a local function, as transforms return it, or a bare function on shards with `in_specs` and `out_specs`.
        mesh: its axes are what f's collectives name.
        in_specs: for a bare function, a spec or pytree prefix of specs per argument (one that is no tuple serves a
            function of one argument).
        out_specs: likewise, for the results.
        name: for messages; the function's own by default.
        bucket: bytes of gradients, or of a layer's gathered parameters, that travel in one collective; "auto" for what
            fits their sum; None for one collective each.
        without: names of rewrites to switch off; `program.passes` lists those that ran.
        backend: what computes between collectives: "eager", torch's kernels op by op, or "inductor", torch's compiler,
            which rounds otherwise and takes its time when the program first runs.

    Returns:
        The compiled function, of the same arguments, by place or name. It traces once per signature of its arguments,
        and mode of its modules (`fp.functional`); what else f closes over counts as it was then. `.program` is the last
        program used.

    Raises:
        LayoutError: when a bare function has no specs, or a local one is given some.
        OutSpecError: when called, if a result does not lie as its spec says.
        TypingError: when called, if the program treats a value as something it is not.
        BackendError: when called, if the backend lacks something on this machine.
        ValueError: for another backend; when called, if there is no rewrite of a name in `without`.
    """
    guards.check_callable(f)
    check_backend(backend)
    if isinstance(f, LocalFunction):
        f.layout.mesh(mesh)
        _check_synchronous(f, mesh)
        if in_specs is not None or out_specs is not None:
            raise LayoutError(f"{f!r} carries its layout; leave in_specs and out_specs out")
    elif in_specs is None or out_specs is None:
        raise LayoutError(
            f"{_name(f)} does not carry a layout: pass in_specs= and out_specs=, or compile what a transform returned. "
            "torch.func's transforms drop the layout; fp.grad, fp.grad_and_value and fp.hessian keep it"
        )
    return Compiled(f, mesh, in_specs, out_specs, name or _name(f), bucket, frozenset(without), backend)


def shard_map(
    f: Callable[..., PyTree] | Mesh | None = None,
    mesh: Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """The local view: a body on shards that writes its collectives by hand, types checked.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> @fp.shard_map(Mesh(data=2, tensor=2), in_specs=(P("data", "tensor"), P("tensor")), out_specs=P("data"))
    ... def f(x, w):
    ...     return fp.psum(x @ w, "tensor")
    >>> f(torch.ones(2, 4), torch.ones(4, 3))
    tensor([[4., 4., 4.],
            [4., 4., 4.]])

    Args:
        f: the body; or leave it out and use the result as a decorator.
        mesh: the mesh.
        in_specs: a spec, or pytree prefix of specs, per argument.
        out_specs: specs of the results.

    Returns:
        A function of whole tensors; torch.func's transforms apply to it.

    Raises:
        LayoutError: when specs or mesh are missing.
        OutSpecError, TypingError: when called, naming every result and line at fault.
    """
    if isinstance(f, Mesh):
        f, mesh = None, f
    if mesh is None or in_specs is None or out_specs is None:
        raise LayoutError("shard_map needs mesh, in_specs and out_specs")
    if f is None:
        return functools.partial(shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return compile(f, mesh, in_specs=in_specs, out_specs=out_specs)


class Compiled:
    """A compiled function: calls run, and it shows what it runs.

    Attributes:
        f: what it was compiled from.
        mesh: the mesh it was compiled for.
        program: the `Program` used last; None before the first call.
    """

    def __init__(
        self,
        f: Callable[..., PyTree],
        mesh: Mesh,
        in_specs: Any,
        out_specs: Any,
        name: str,
        bucket: int | str | None = None,
        without: Collection[str] = (),
        backend: str = "eager",
    ) -> None:
        self.f, self.mesh, self.name, self.bucket, self.without = f, mesh, name, bucket, without
        self.backend = backend
        self.program: Any = None
        self._in_specs, self._out_specs = in_specs, out_specs
        self._staged: Programs[Staged] = Programs()

    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        if recorder() is not None:
            raise LayoutError(
                f"{current_source() or 'a call'}: {self!r} is called inside a function that is being traced, where "
                "every rank would run the program of all ranks; call there what it was compiled from, its `.f`"
            )
        staged, tensors = self._stage(self._by_place(args, named))
        result = staged.unflatten(runtime_of(self.mesh, self.f).run_whole(staged.program, tensors))
        return result if self._stacks is None else self._stacks.restack_all(result)

    @property
    def _stacks(self) -> Any:
        return self.f.layout.stacks if isinstance(self.f, LocalFunction) else None

    def lower(self, *args: PyTree, **named: PyTree) -> Any:
        """The program for these arguments, tensors of any device (meta included); nothing runs."""
        return self._stage(self._by_place(args, named))[0].program

    def explain(self, *args: PyTree, **options: Any) -> Any:
        """Every collective of the program: kind, axis, count, bytes, source line.

        Args:
            args: arguments to trace for; none for the program used last.
            options: as for `Program.explain`.
        """
        program = self.lower(*args) if args else self.program
        if program is None:
            raise LayoutError(f"{self.name} has not run yet: call it, or give explain() its arguments")
        return program.explain(**options)

    def __repr__(self) -> str:
        return f"compile({self.f!r}, {self.mesh!r})" if isinstance(self.f, LocalFunction) else f"compile({self.name})"

    def _by_place(self, args: tuple[PyTree, ...], named: dict[str, PyTree]) -> tuple[PyTree, ...]:
        return by_place(layout_of(self.f).signature, self.name, args, named) if named else args

    def _stage(self, args: tuple[PyTree, ...]) -> tuple[Staged, list[torch.Tensor]]:
        if self._stacks is not None:
            args = (self._stacks.unstack(args[0]), *args[1:])
        leaves, tree = optree.tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = (tree, tuple(_signature(leaf) for leaf in leaves))
        staged = self._staged.get(key, lambda: self._trace(args))
        self.program = staged.program
        return staged, tensors

    def _trace(self, args: tuple[PyTree, ...]) -> Staged:
        return stage(
            self.f,
            self.mesh,
            args,
            self._in_specs,
            self._out_specs,
            name=self.name,
            bucket=self.bucket,
            without=self.without,
            backend=self.backend,
        )


@dataclass
class Staged:
    """A program with what is needed to give its flat results their tree back."""

    program: Any  # Program, or PipelineProgram
    out_tree: Any
    outputs: list[Any]
    assumptions: list[Assumption] = field(default_factory=list)

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> PyTree:
        remaining = iter(tensors)
        return optree.tree_unflatten(self.out_tree, [next(remaining) if x is _TENSOR else x for x in self.outputs])


_TENSOR = object()
UNCHECKED = object()  # for out_specs: take the results rank by rank, whatever their types


@leaving_nothing()
def stage(
    f: Callable[..., PyTree],
    mesh: Mesh,
    args: tuple[PyTree, ...],
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    name: str,
    parameters: str = "0",
    carried: str | None = None,
    donate: bool = False,
    bucket: int | str | None = None,
    without: Collection[str] = (),
    backend: str = "eager",
    watch: Callable[[str, Program, Mesh], None] = lambda *_: None,
) -> Staged:
    """Trace a function on shards, type its values, check how its results lie, and run the passes that it asks for.

    Args:
        f, mesh, args, in_specs, out_specs, name, bucket, without, backend: as for `compile`.
        parameters: the path of the argument that holds the model's parameters.
        watch: called with the name of each rewrite after it, the program, and the mesh with its virtual axes.
        carried: the path of the argument that steps hand on: parameters and optimizer state; None for none.
        donate: whether the program may write into that.
    """
    layout = layout_of(f)
    wide = layout.mesh(mesh)
    with bind(wide.shape, None):
        specs = layout.arguments(args) if isinstance(f, LocalFunction) else _per_argument(in_specs, args)
        full = tuple(broadcast_specs(spec, arg) for spec, arg in zip(specs, args, strict=True))
        parts = parts_of(args, full, wide, layout.virtual_sizes(mesh))
        leaves, tree = optree.tree_flatten(args)
        flat_specs = optree.tree_leaves(full)
        chosen = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        found: dict[str, Any] = {}
        run = f.run if isinstance(f, LocalFunction) else f

        def flat(*values: torch.Tensor) -> list[Any]:
            filled = list(leaves)
            for index, value in zip(chosen, values, strict=True):
                filled[index] = value
            say_specs([flat_specs[index] for index in chosen])
            result = run(*optree.tree_unflatten(tree, filled))
            outputs, found["tree"] = optree.tree_flatten(result)
            declared = f.results if isinstance(f, LocalFunction) else None if out_specs is UNCHECKED else out_specs
            found["specs"] = optree.tree_leaves(broadcast_specs(declared, result))
            found["paths"] = tree_paths(result)
            found["outputs"] = [_TENSOR if isinstance(output, torch.Tensor) else output for output in outputs]
            return [output for output in outputs if isinstance(output, torch.Tensor)]

        avals = [local_aval(leaves[index], flat_specs[index], wide, parts) for index in chosen]
        types = [declared_type(flat_specs[index]) for index in chosen]
        with bind(wide.shape, None, {axis: each.samples for axis, each in parts.items()}), assumed() as assumptions:
            traced = trace(flat, avals, types=types, on_node=Typing(wide.shape))
        held = [type_of(output) for output in traced.outputs]
        traced = simplify(drop_trivial(forget_values(traced), wide, kept=_pipelined_axes(layout)))
    kept = [index for index, output in enumerate(found["outputs"]) if output is _TENSOR]
    paths = tree_paths(args)
    returned = {found["paths"][index]: position for position, index in enumerate(kept)}
    for node, index in zip(traced.inputs, chosen, strict=True):
        node.meta.update(
            path=paths[index],
            parameter=_is_in(paths[index], parameters),
            carried=carried is not None and _is_in(paths[index], carried),
            donated=donate and carried is not None and _is_in(paths[index], carried),
            becomes=returned.get(paths[index]),
        )
        if node.meta["parameter"]:
            node.meta["own_path"] = paths[index][len(parameters) + 1 :]
    program = Program(
        traced,
        mesh=mesh,
        in_specs=[flat_specs[index] for index in chosen],
        out_specs=[found["specs"][index] for index in kept],
        in_paths=[paths[index] for index in chosen],
        out_paths=[found["paths"][index] for index in kept],
        name=name,
        backend=backend,
    )
    shapes = optree.tree_map(hollow, args)
    program.restage = functools.partial(
        stage,
        f,
        mesh,
        shapes,
        in_specs,
        out_specs,
        name=name,
        parameters=parameters,
        carried=carried,
        donate=donate,
        bucket=bucket,
        without=without,
        backend=backend,
    )
    if out_specs is not UNCHECKED:
        _check_results(program, held)
    rewritten = rewrite(program, layout, parts, bucket, donate, without, watch)
    if isinstance(rewritten, PipelineProgram):
        rewritten.memory_by = pipeline_memory
        for part in rewritten.every_program():
            part.traced.settle()
    elif isinstance(rewritten, Program):  # else it is what a search wants to know
        rewritten.traced.settle()
    return Staged(rewritten, found["tree"], found["outputs"], assumptions)


def _is_in(path: str, parent: str) -> bool:
    return f"{path}/".startswith(f"{parent}/")


def _check_synchronous(f: LocalFunction, mesh: Mesh) -> None:
    plan = f.layout.pipeline
    if plan is not None and plan.on(mesh).versions is not None:
        raise PipelineError(
            f"{plan.on(mesh).name} updates weights while microbatches are under way, which a gradient cannot: run it "
            "with fp.train_step, or take a synchronous schedule"
        )


def _pipelined_axes(layout: Layout) -> tuple[str, ...]:
    """Axes whose sums say where a pipeline ends, even over one microbatch."""
    return () if layout.pipeline is None else (layout.pipeline.virtual,)


def runtime_of(mesh: Mesh, f: Any, reduction: str = "fast") -> Any:
    """What runs a function's programs: the mesh's runtime, around it that of the pipeline if there is one."""
    base = default_runtime(mesh, reduction)
    plan = f.layout.pipeline if isinstance(f, LocalFunction) else None
    return base if plan is None else PipelineRuntime(base, plan.axis)


# -----------------------------------------------------------------------------
# Specs and types
# -----------------------------------------------------------------------------


def _check_results(program: Program, types: list[Type]) -> None:
    """A result's type is what its spec says: no less, or ranks disagree; no more, or copies are taken for shards."""
    wrong = []
    for held, spec, path in zip(types, program.out_specs, program.out_paths, strict=True):
        wanted = declared_type(spec)
        for axis in sorted({*held, *wanted}):
            if held[axis] is not wanted[axis]:
                wrong.append(f"  {path or 'the result'}: {_mismatch(axis, held[axis], wanted[axis], spec)}")
    if wrong:
        raise OutSpecError(f"{program.name}: results do not lie as out_specs say:\n" + "\n".join(wrong))


def _mismatch(axis: str, held: State, wanted: State, spec: P) -> str:
    fixes = {
        (
            State.VARYING,
            State.INVARIANT,
        ): f"differs by rank along {axis!r}, but {spec!r} says that all ranks hold the same; "
        f"a missing psum? write fp.psum(x, {axis!r}) or mention {axis!r} in the spec",
        (
            State.INVARIANT,
            State.VARYING,
        ): f"is the same on all ranks along {axis!r}, but {spec!r} says that it is sharded; "
        f"leave {axis!r} out of the spec, or write fp.pscatter(x, {axis!r}) or fp.pvary(x, {axis!r})",
        (State.UNREDUCED, State.INVARIANT): f"holds partial sums along {axis!r}, but {spec!r} does not say so; "
        f"write fp.psum(x, {axis!r}) or P(…, unreduced={{{axis!r}}})",
    }
    return fixes.get((held, wanted), f"is {held} along {axis!r}, but {spec!r} says {wanted}")


def _per_argument(specs: Any, args: tuple[PyTree, ...]) -> tuple[SpecTree, ...]:
    given = specs if isinstance(specs, tuple) else (specs,)
    if len(given) != len(args):
        raise LayoutError(f"in_specs has {len(given)} entries for {len(args)} arguments; give one per argument")
    return given


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device)
    return (type(leaf).__name__, repr(leaf))


def _name(f: Any) -> str:
    return getattr(f, "name", None) or getattr(f, "__name__", None) or type(f).__name__
