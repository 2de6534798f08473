"""Compile functions on shards for a mesh. The compiled functions map full tensors to full tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import nn

from sharding_specs import Mesh, register_dataclasses

from .collectives import check_callable
from .errors import LayoutError
from .functions import (
    LocalFunction,
    PyTree,
    Resolved,
    SpecTree,
    applied_to,
    bind_positional,
    explain_keywords,
    require_mesh,
)
from .ir import current_source, with_short_tracebacks
from .lowering import ArgumentPaths, Lowered, lower, per_argument
from .partitioner import call_shard_map
from .passes import Options, pass_names
from .pipelines import PipelineProgram
from .program import Explanation, Memory, PassTable, Program
from .quantities import is_positive_int
from .runtime import check_backend, moved_to, refuse_asynchronous, runtime_of
from .stateful import (
    Sharded,
    StatefulProgram,
    held_argument,
    new_state_of,
    require_same_state,
    run_held,
    steps_of,
    tensors_of,
)
from .tracing import disable_ambient_modes, gradients_wanted, recorder


@explain_keywords
def compile(
    f: Callable[..., PyTree],
    mesh: Mesh,
    *,
    in_specs: SpecTree = None,
    out_specs: SpecTree = None,
    name: str | None = None,
    bucket: int | str | None = None,
    without: Collection[str] = (),
    backend: str = "eager",
    state: int | None = None,
    memory: Memory | None = None,
) -> Compiled:
    """Compile a function on shards into a program for a mesh. Inputs and outputs are full tensors.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> step = fp.compile(lambda x: fp.psum(x.sum(), "data"), Mesh(data=2), in_specs=P("data"), out_specs=P())
    >>> step(torch.arange(4.0))
    tensor(6.)

    Args:
        f: a local function, as returned by a transform, or a bare function on shards with `in_specs` and `out_specs`.
        mesh: the mesh; the collectives of `f` use the names of its axes.
        in_specs: for a bare function, a spec or pytree prefix of specs per argument. A value that is not a tuple is
            for a function of one argument.
        out_specs: for a bare function, a spec or pytree prefix of specs for the results.
        name: the name in messages. The default is the name of `f`.
        bucket: bytes of gradients, or of a layer's gathered parameters, per collective. "auto" derives the size from
            their sum. None uses one collective per tensor.
        without: one or several names of passes to disable. `program.passes` lists the passes that ran. "repeats"
            traces and partitions repeated layers op by op.
        backend: the executor of the ops between collectives. "eager" runs torch's kernels op by op. "inductor" uses
            torch's compiler; it rounds differently and compiles when the program first runs.
        state: index of the argument that the second result of `f` replaces, for `f(params, state, *batch) -> (result,
            new_state)`. The new state stays on the ranks as an `fp.Sharded`, and is donated to the next call. The first
            call may take a full tree, which is sharded by its specs. It may also take None: the function then makes the
            state, in the layout that its ops give it.
        memory: budget of each memory of a rank. By default there is none.

    Returns:
        The compiled function, with the arguments of `f`, positional or by keyword; an argument may be an `fp.Sharded`.
        It traces once per signature of its arguments and mode of its modules (`fp.functional`). Other closed-over
        values are constants from that trace. `.program` is the last program used.

    Raises:
        LayoutError: when a bare function has no specs, or a local function is passed specs.
        OutSpecError: when called, if the layout of a result differs from its spec, or a new state's from the old one's.
        SpecError: when called, if the specs do not match the structure of arguments or results, or an `fp.Sharded` has
            another layout; the message has the path.
        DonatedStateError: when called, if the state was given to an earlier call.
        TypingError: when called, if the program treats a value as something it is not.
        BudgetError: when called, if the predicted peak of a memory is above its budget.
        BackendError: when called, if the backend lacks something on this machine.
        ValueError: for an unknown backend, or a `state` that is no index; when called, if `without` names a pass that
            does not exist.
    """
    check_callable(f)
    require_mesh(mesh, "compile")
    check_backend(backend)
    if state is not None and state != 0 and not is_positive_int(state):
        raise ValueError(
            f"compile(state={state!r}): it is the index of the argument that is the state, 1 for the second"
        )
    if isinstance(f, LocalFunction):
        f.applied.mesh(mesh)
        refuse_asynchronous(f, mesh)
        if in_specs is not None or out_specs is not None:
            raise LayoutError(f"{f} carries its layout; leave in_specs and out_specs out")
    elif in_specs is None or out_specs is None:
        raise LayoutError(
            f"{_name(f)} does not carry a layout: pass in_specs= and out_specs=, or compile what a transform returned. "
            "torch.func's transforms drop the layout; fp.grad, fp.grad_and_value and fp.hessian keep it"
            + ("; fp.functional(module) makes a function that a plan takes" if isinstance(f, nn.Module) else "")
        )
    options = Options(
        bucket=bucket, without=pass_names(without), backend=backend, donate=state is not None, memory=memory
    )
    specs = None if isinstance(f, LocalFunction) else (in_specs, out_specs)
    return Compiled(f, mesh, specs, name or _name(f), options, state)


@overload
def shard_map(f: Callable[..., PyTree], mesh: Mesh, in_specs: SpecTree, out_specs: SpecTree) -> Compiled: ...
@overload
def shard_map(f: Mesh, *, in_specs: SpecTree, out_specs: SpecTree) -> Callable[[Callable[..., PyTree]], Compiled]: ...
@overload
def shard_map(
    *, mesh: Mesh, in_specs: SpecTree, out_specs: SpecTree
) -> Callable[[Callable[..., PyTree]], Compiled]: ...
def shard_map(
    f: Callable[..., PyTree] | Mesh | None = None,
    mesh: Mesh | None = None,
    in_specs: SpecTree = None,
    out_specs: SpecTree = None,
) -> Compiled | Callable[[Callable[..., PyTree]], Compiled]:
    """Map a body over shards. The body writes its collectives explicitly, and its types are checked.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> @fp.shard_map(Mesh(data=2, tensor=2), in_specs=(P("data", "tensor"), P("tensor")), out_specs=P("data"))
    ... def f(x, w):
    ...     return fp.psum(x @ w, "tensor")
    >>> f(torch.ones(2, 4), torch.ones(4, 3))
    tensor([[4., 4., 4.],
            [4., 4., 4.]])

    Args:
        f: the body. Omit it to use the result as a decorator.
        mesh: the mesh.
        in_specs: a spec, or pytree prefix of specs, per argument.
        out_specs: specs of the results.

    Returns:
        A function of full tensors. torch.func's transforms apply to it. It can be called in the function of a plan,
        where the transforms enter the body along the axes of its specs and partition it along the others. In another
        body, or along axes that no transform splits, the call slices its arguments and gathers its results.

    Raises:
        LayoutError: when specs or mesh are missing.
        OutSpecError, TypingError: when called; the message names every wrong result and source line.
        SpecError: when called, if the specs do not match the structure of arguments or results; the message has the
            path.
    """
    if isinstance(f, Mesh):
        f, mesh = None, f
    if mesh is None or in_specs is None or out_specs is None:
        raise LayoutError("shard_map needs mesh, in_specs and out_specs")
    if f is None:
        return partial(shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return compile(f, mesh, in_specs=in_specs, out_specs=out_specs)


class Compiled:
    """Compiled function. A call runs its program, which can be inspected.

    Attributes:
        f: the function that was compiled.
        mesh: the mesh that it was compiled for.
    """

    def __init__(
        self,
        f: Callable[..., PyTree],
        mesh: Mesh,
        specs: tuple[SpecTree, SpecTree] | None,
        name: str,
        options: Options,
        state: int | None = None,
    ) -> None:
        self.f, self.mesh, self.name, self.options, self.state = f, mesh, name, options, state
        self._specs, self._runtime = specs, partial(runtime_of, mesh, f)
        self._programs = StatefulProgram(name, "call it, or give explain() its arguments")

    @property
    def program(self) -> Program | PipelineProgram | None:
        """The last program used; None before the first call."""
        return self._programs.program

    @with_short_tracebacks
    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        if recorder() is not None:
            return self._inside(self._by_place(args, named))
        runtime, args = self._runtime(), self._by_place(args, named)
        lowered = self._lower(args, runtime.device)
        if self.state is not None or any(isinstance(arg, Sharded) for arg in args):
            return run_held(self._programs, lowered, args, self.state, self._runtime)
        tensors = tensors_of(lowered.entered(args))
        lowered.require_layouts(tensors)
        with disable_ambient_modes():
            return lowered.result(runtime.run_whole(lowered.program, tensors))

    def _inside(self, args: tuple[PyTree, ...]) -> PyTree:
        """Call the function inside a trace. A bare function becomes a region of the traced program."""
        if self._specs is None:
            raise LayoutError(
                f"{current_source() or 'a call'}: {self!r} is called inside a function that is being traced, where "
                "every rank would run the program of all ranks; call there what it was compiled from, its `.f`"
            )
        in_specs, out_specs = self._specs
        specs = per_argument(in_specs, args, self.name)
        return call_shard_map(self.f, self.mesh, specs, out_specs, self.name, args)

    @with_short_tracebacks
    def lower(self, *args: PyTree, **named: PyTree) -> Program | PipelineProgram:
        """Return the program for these arguments, without running it. Tensors may be on any device, including meta."""
        return self._lower(self._by_place(args, named)).program

    @with_short_tracebacks
    def hold(self, *args: PyTree, others: Sequence[Program | PipelineProgram] = ()) -> Sharded:
        """Return the first argument as the program for these arguments holds it, for several calls with it.

        >>> import torch, functional_parallel as fp
        >>> from sharding_specs import Mesh, P
        >>> f = fp.compile(fp.zero(3, "data")(lambda w, x: x @ w), Mesh(data=2))
        >>> f.hold(torch.ones(4), torch.ones(2, 4))
        Sharded on Mesh(data=2)
          the tensor: (4,) float32, P('data')

        Args:
            args: the arguments. The first is full tensors, or an `fp.Sharded` in any layout on these ranks.
            others: other programs with this first argument. Ranks of a pipeline also hold what their stages need.
        """
        return held_argument(self._lower(args, self._runtime().device), args[0], self._runtime, others)

    def steps(self, first: Sharded, state: PyTree) -> Callable[[Sharded], tuple[PyTree, Sharded]]:
        """Return the function of the state alone, for many calls with one first argument. It checks nothing again.

        Args:
            first: what `hold` returned.
            state: the state, or tensors like it.
        """
        lowered = self._lower((first, state), self._runtime().device)
        return steps_of(self._programs, lowered, first, self._runtime)

    def new_state(self, *args: PyTree) -> tuple[PyTree, SpecTree]:
        """Return the new state for these arguments, as tensors without values, and its specs. Nothing runs.

        Args:
            args: the arguments. Their tensors may be on the meta device.
        """
        return new_state_of(self._lower(args))

    def explain(self, *args: PyTree, group: str = "line", casts: bool = False) -> Explanation | PassTable:
        """Describe every collective of the program: kind, axis, count, bytes, source line.

        Args:
            args: the arguments to trace for. Without arguments, the last program used is described.
            group, casts: as for `Program.explain`.

        Raises:
            LayoutError: when there are no arguments and no program yet.
        """
        if args:
            self.lower(*args)
        return self._programs.explain(group, casts)

    def __repr__(self) -> str:
        return f"compile({self.f}, {self.mesh!r})" if isinstance(self.f, LocalFunction) else f"compile({self.name})"

    def _by_place(self, args: tuple[PyTree, ...], named: dict[str, PyTree]) -> tuple[PyTree, ...]:
        register_dataclasses(args, named)
        return bind_positional(applied_to(self.f).signature, self.name, args, named) if named else args

    def _lower(self, args: tuple[PyTree, ...], device: torch.device | None = None) -> Lowered:
        moved = tuple(arg.like(device) if isinstance(arg, Sharded) else moved_to(device, arg) for arg in args)
        return self._programs.lower(moved, None, lambda: self._traced(moved), exact=True)

    @property
    def _takes_derivatives(self) -> bool:
        """Whether the function is or may contain a derivative that is taken of a trace."""
        return not isinstance(self.f, LocalFunction) or bool(_DERIVATIVES.intersection(self.f.applied.describe))

    def _traced(self, args: tuple[PyTree, ...]) -> Lowered:
        resolved: Any = self.f.resolve(args, self.mesh) if isinstance(self.f, LocalFunction) else self._specs
        taken = resolved.entered(args) if isinstance(resolved, Resolved) else args
        paths = ArgumentPaths() if self.state is None else ArgumentPaths(state=str(self.state), new_state="1")
        with gradients_wanted(torch.is_grad_enabled() or self._takes_derivatives):
            lowered = lower(self.f, self.mesh, taken, resolved, name=self.name, options=self.options, paths=paths)
        if self.state is not None:
            require_same_state(lowered, taken, self.state)
        return lowered


_DERIVATIVES = {"grad", "grad_and_value", "hessian", "jvp", "vmap"}


def _name(f: Callable[..., PyTree]) -> str:
    return getattr(f, "name", None) or getattr(f, "__name__", None) or type(f).__name__
