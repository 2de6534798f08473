"""Functions on shards compiled for a mesh: called on whole tensors, they give whole tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import optree
import torch
from torch import nn

from sharding_specs import Mesh, register_dataclasses

from .collectives import guards
from .functions import LocalFunction, PyTree, bind_positional, explain_keywords, layout_of, require_mesh
from .ir import current_source
from .lowering import LayoutError, Lowered, Options, call_shard_map, lower
from .passes import pass_names
from .pipelines import PipelineError, PipelineProgram
from .program import Program
from .runtime import PipelineRuntime, check_backend, default_runtime
from .tracing import ProgramCache, disable_ambient_modes, recorder

__all__ = ["Compiled", "compile", "refuse_asynchronous", "runtime_of", "shard_map"]


@explain_keywords
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
        without: rewrites to switch off, one name or several; `program.passes` lists those that ran.
        backend: what computes between collectives: "eager", torch's kernels op by op, or "inductor", torch's compiler,
            which rounds otherwise and takes its time when the program first runs.

    Returns:
        The compiled function, of the same arguments, by place or name. It traces once per signature of its arguments,
        and mode of its modules (`fp.functional`); what else f closes over counts as it was then. `.program` is the last
        program used.

    Raises:
        LayoutError: when a bare function has no specs, or a local one is given some.
        OutSpecError: when called, if a result does not lie as its spec says.
        SpecError: when called, if the specs' structure is not that of arguments or results, naming where.
        TypingError: when called, if the program treats a value as something it is not.
        BackendError: when called, if the backend lacks something on this machine.
        ValueError: for another backend; when called, if there is no rewrite of a name in `without`.
    """
    guards.check_callable(f)
    require_mesh(mesh, "compile")
    check_backend(backend)
    if isinstance(f, LocalFunction):
        f.layout.mesh(mesh)
        refuse_asynchronous(f, mesh)
        if in_specs is not None or out_specs is not None:
            raise LayoutError(f"{f!r} carries its layout; leave in_specs and out_specs out")
    elif in_specs is None or out_specs is None:
        raise LayoutError(
            f"{_name(f)} does not carry a layout: pass in_specs= and out_specs=, or compile what a transform returned. "
            "torch.func's transforms drop the layout; fp.grad, fp.grad_and_value and fp.hessian keep it"
            + ("; fp.functional(module) makes a function that a plan takes" if isinstance(f, nn.Module) else "")
        )
    options = Options(bucket=bucket, without=pass_names(without), backend=backend)
    return Compiled(f, mesh, None if isinstance(f, LocalFunction) else (in_specs, out_specs), name or _name(f), options)


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
        A function of whole tensors; torch.func's transforms apply to it. In a plan's function, or a body, it is a part
        of that, over axes that are not split there: slices are taken and results gathered.

    Raises:
        LayoutError: when specs or mesh are missing.
        OutSpecError, TypingError: when called, naming every result and line at fault.
        SpecError: when called, if the specs' structure is not that of arguments or results, naming where.
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
        specs: tuple[Any, Any] | None,
        name: str,
        options: Options,
    ) -> None:
        self.f, self.mesh, self.name, self.options = f, mesh, name, options
        self.program: Program | PipelineProgram | None = None
        self._specs = specs
        self._lowered: ProgramCache[Lowered] = ProgramCache(name, below=2)

    def __call__(self, *args: PyTree, **named: PyTree) -> PyTree:
        if recorder() is not None:
            return self._inside(self._by_place(args, named))
        lowered, tensors = self._lower(self._by_place(args, named))
        lowered.require_layouts(tensors)
        with disable_ambient_modes():
            result = lowered.unflatten(runtime_of(self.mesh, self.f).run_whole(lowered.program, tensors))
        return result if self._stacks is None else self._stacks.restack_all(result)

    def _inside(self, args: tuple[PyTree, ...]) -> PyTree:
        """Called in a trace, a bare function is a part of it; what has a plan of its own is not."""
        if self._specs is None:
            raise LayoutError(
                f"{current_source() or 'a call'}: {self!r} is called inside a function that is being traced, where "
                "every rank would run the program of all ranks; call there what it was compiled from, its `.f`"
            )
        return call_shard_map(self.f, self.mesh, *self._specs, self.name, args)

    @property
    def _stacks(self) -> Any:
        return self.f.layout.stacks if isinstance(self.f, LocalFunction) else None

    def lower(self, *args: PyTree, **named: PyTree) -> Any:
        """The program for these arguments, tensors of any device (meta included); nothing runs."""
        return self._lower(self._by_place(args, named))[0].program

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
        register_dataclasses(args, named)
        return bind_positional(layout_of(self.f).signature, self.name, args, named) if named else args

    def _lower(self, args: tuple[PyTree, ...]) -> tuple[Lowered, list[torch.Tensor]]:
        if self._stacks is not None:
            args = (self._stacks.unstack(args[0]), *args[1:])
        leaves, tree = optree.tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = (tree, tuple(_signature(leaf) for leaf in leaves))
        make = functools.partial(lower, self.f, self.mesh, args, self._specs, name=self.name, options=self.options)
        lowered = self._lowered.get(key, make)
        self.program = lowered.program
        return lowered, tensors


def refuse_asynchronous(f: LocalFunction, mesh: Mesh) -> None:
    """Refuse a pipeline whose weights change on the way, of which only a training step makes sense."""
    plan = f.layout.pipeline
    if plan is not None and plan.on(mesh).versions is not None:
        raise PipelineError(
            f"{plan.on(mesh).name} updates weights while microbatches are under way: train with it by fp.train_step; "
            "for a gradient, or to evaluate, take a synchronous schedule, such as '1f1b'"
        )


def runtime_of(mesh: Mesh, f: Any, reduction: str = "fast") -> Any:
    """What runs a function's programs: the mesh's runtime, around it that of the pipeline if there is one."""
    base = default_runtime(mesh, reduction)
    plan = f.layout.pipeline if isinstance(f, LocalFunction) else None
    return base if plan is None else PipelineRuntime(base, plan.axis)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.device)
    return (type(leaf).__name__, repr(leaf))


def _name(f: Any) -> str:
    return getattr(f, "name", None) or getattr(f, "__name__", None) or type(f).__name__
