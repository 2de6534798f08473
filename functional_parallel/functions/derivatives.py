"""torch.func's transforms, which here keep layouts and flatten every pytree with optree.

`fp.grad(f)` is `torch.func.grad(f)` in three settings:

- For a local function it returns a local function. Its layout contains the specs of the gradients.
- Inside a `shard_map` body it first traces and types the function. An Invariant value that is combined with a Varying
  one is then cast where automatic differentiation sees the cast.
- For any other function, the only difference is that leaves that are not floating-point are skipped, not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, broadcast_specs, register_dataclasses

from .. import _torch
from ..checker import Typing, type_of
from ..collectives import dims_of_leaves, dual, pvary
from ..collectives import vmap as _vmap
from ..ir import first_operand, hollow, info, is_trained, primitive_name, update_info
from ..tracing import Recorder, recorder
from .forward_first import filled, forward_first
from .keywords import copy_signature
from .local_function import LocalFunction, as_local_function
from .request import PyTree, SpecTree
from .resolved import Resolved, beside

Argnums = int | Sequence[int]


def grad_and_value(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function for gradients and value: `grads, value = grad_and_value(f)(params, batch)`.

    >>> import torch, functional_parallel as fp
    >>> fp.grad_and_value(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0]), "steps": 3})
    ({'w': tensor([2., 4.]), 'steps': None}, tensor(5.))

    Args:
        f: returns a scalar tensor, or (with `has_aux`) a scalar tensor and any other value.
        argnums: number of the argument, or arguments, to differentiate by; any optree pytrees.
        has_aux: whether f returns `(value, aux)`.

    Returns:
        A function that returns `(gradients, value)` or `(gradients, (value, aux))`. Gradients have the structure of the
        argument, with None for each leaf that is not a floating-point tensor. For a local f, a local function. In a
        body on shards, the gradient of a value that differs by rank is the gradient of its sum over the ranks: n times
        the gradient of the mean. For a mean, differentiate `fp.pmean(value, axis)`.
    """

    def specs(resolved: Resolved, own: SpecTree) -> SpecTree:
        return _gradient_specs(resolved, argnums), own

    return _derived(f, _gradient_call(argnums, has_aux, _name(f)), specs, "grad_and_value")


def grad(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function for the gradients of a scalar function; see `grad_and_value`.

    >>> import torch, functional_parallel as fp
    >>> fp.grad(lambda x: (x ** 3).sum())(torch.tensor([2.0]))
    tensor([12.])

    Args:
        f, argnums, has_aux: as for `grad_and_value`.

    Returns:
        A function that returns the gradients, or `(gradients, aux)`. As for `grad_and_value`, a loss that differs by
        rank gives the gradient of its sum over the ranks.
    """
    both = _gradient_call(argnums, has_aux, _name(f))

    def gradients(f: Callable[..., Any], *args: PyTree, **named: PyTree) -> PyTree:
        grads, value = both(f, *args, **named)
        return (grads, value[1]) if has_aux else grads

    def specs(resolved: Resolved, own: SpecTree) -> SpecTree:
        found = _gradient_specs(resolved, argnums)
        return (found, own[1]) if has_aux else found

    return _derived(f, gradients, specs, "grad")


def hessian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """Return a function for the second derivatives by one tensor, computed as forward over reverse.

    >>> import torch, functional_parallel as fp
    >>> fp.hessian(lambda x: (x ** 3).sum())(torch.tensor([1.0, 2.0]))
    tensor([[ 6.,  0.],
            [ 0., 12.]])

    Args:
        f: returns a scalar tensor.
        argnums: the argument to differentiate by; one tensor.

    Returns:
        A function of the same arguments. Its result has the dims of the differentiated argument twice.
    """
    if not isinstance(f, LocalFunction):
        return torch.func.jacfwd(grad(f, argnums), argnums)  # a body types the reverse pass

    def call(f: Callable[..., Any], *args: PyTree) -> PyTree:
        return torch.func.hessian(f, argnums)(*args)

    def results(resolved: Resolved, _: SpecTree) -> P:
        spec = resolved.arguments[argnums]
        if not isinstance(spec, P) or spec.axes:
            raise ValueError(
                f"fp.hessian by a sharded or structured argument ({spec}): each rank would hold some blocks of the "
                "matrix only; keep that argument one whole tensor, or take fp.jvp of fp.grad for products with a vector"
            )
        return spec.dual()

    return _derived(f.without_schedule(), call, results, "hessian")


def jvp(f: Callable[..., Any], primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
    """Return the value and the directional derivative: `torch.func.jvp` on optree pytrees.

    >>> import torch, functional_parallel as fp
    >>> fp.jvp(lambda x: (x ** 2).sum(), (torch.tensor([3.0]),), (torch.tensor([1.0]),))
    (tensor(9.), tensor(6.))

    Args:
        f: any function, including a local function.
        primals: its arguments.
        tangents: the direction, with the same structure. Leaves at positions of non-floating primals are ignored.
    """
    register_dataclasses(primals, tangents)
    leaves, tree = optree.tree_flatten(primals)
    directions = tree.flatten_up_to(tangents)
    moving = [index for index, leaf in enumerate(leaves) if is_trained(leaf)]
    run = f if isinstance(f, LocalFunction) and f.applied.axes else forward_first(f, lenient=True)

    def flat(*values: torch.Tensor) -> tuple[tuple[Any, ...], optree.PyTreeSpec]:
        result = run(*filled(leaves, moving, values, tree))
        register_dataclasses(result)
        outputs, out_tree = optree.tree_flatten(result)
        return tuple(outputs), out_tree

    of_leaves, out_tree = beside(flat)
    values, derivatives = torch.func.jvp(  # type: ignore[misc]  # three values only with has_aux
        of_leaves, tuple(leaves[index] for index in moving), tuple(directions[index] for index in moving)
    )
    return optree.tree_unflatten(out_tree(), values), optree.tree_unflatten(out_tree(), derivatives)


def vmap(
    f: Callable[..., Any],
    in_dims: PyTree = 0,
    out_dims: PyTree = 0,
    *,
    axis_name: str | None = None,
    spmd_axis: str | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """Map a function as `torch.func.vmap` does. The mapped dim may be a virtual mesh axis or be sharded over an axis.

    With `axis_name`, the mapped dim is a separate mesh axis that collectives inside may name. Laws of collectives can
    therefore be checked in microseconds. With `spmd_axis`, the mapped dim is sharded over an axis of the mesh. With
    neither, a local function keeps its layout and the mapped dim is replicated.

    >>> import torch, functional_parallel as fp
    >>> fp.vmap(lambda x: fp.psum(x, "i"), axis_name="i", out_dims=None)(torch.tensor([1.0, 2.0]))
    tensor(3.)

    >>> from sharding_specs import Mesh
    >>> per_sample = fp.vmap(fp.grad(lambda w, x: (w * x) ** 2), in_dims=(None, 0), spmd_axis="data")
    >>> fp.compile(per_sample, Mesh(data=2))(torch.tensor(1.0), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([ 2.,  8., 18., 32.])

    Args:
        f: any function. With `spmd_axis`, a plain function is treated as a local one.
        in_dims, out_dims: as for torch.func.vmap.
        axis_name: name that collectives inside f use for the mapped dim.
        spmd_axis: mesh axis that shards the mapped dim; the result is a local function.
        options: randomness, chunk_size, axis_size.

    Raises:
        ValueError: if both names are given, or if the layout of f already uses `spmd_axis`.
    """
    if axis_name is not None and spmd_axis is not None:
        raise ValueError("fp.vmap takes axis_name (a virtual axis) or spmd_axis (an axis of the mesh), not both")
    if axis_name is not None or (spmd_axis is None and not isinstance(f, LocalFunction)):
        own = f if axis_name is not None else forward_first(f, lenient=True)
        return _vmap(own, in_dims, out_dims, axis_name=axis_name, **options)
    local = as_local_function(f).without_schedule()
    if spmd_axis in local.applied.axes:
        raise ValueError(f"fp.vmap(spmd_axis={spmd_axis!r}): {local} splits over {spmd_axis!r} itself already")
    return _mapped(local, in_dims, out_dims, spmd_axis, options)


def _mapped(
    f: LocalFunction, in_dims: PyTree, out_dims: PyTree, axis: str | None, options: dict[str, Any]
) -> LocalFunction:
    name = "vmap" if axis is None else f"vmap(spmd_axis={axis!r})"

    def start(args: tuple[PyTree, ...], mesh: Mesh) -> Resolved:
        leaves, tree = optree.tree_flatten(args)
        dims = dims_of_leaves(in_dims, args)
        of_one = tree.unflatten([_of_one(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)])
        inner = f.applied.resolve(of_one, mesh)
        specs = [_with_mapped(*each, axis) for each in zip(inner.specs, leaves, dims, strict=True)]
        return replace(Resolved.of(args, mesh, specs, name), inner=inner)

    def call(resolved: Resolved, *args: PyTree) -> tuple[PyTree, SpecTree]:
        run, own_specs = _run_of(f, resolved.inside)
        mapped = _vmap(run, in_dims, out_dims, **options)
        value = mapped(*args if axis is None else _varied(args, dims_of_leaves(in_dims, args), axis))
        specs = optree.tree_leaves(broadcast_specs(own_specs(), value))
        leaves, tree = optree.tree_flatten(value)
        dims = dims_of_leaves((out_dims,), (value,))
        return value, tree.unflatten([_with_mapped(*each, axis) for each in zip(specs, leaves, dims, strict=True)])

    applied = replace(
        f.applied,
        axes=f.applied.axes if axis is None else (*f.applied.axes, axis),
        describe=(*f.applied.describe, name),
        resolvers=(),
        start=start,
    )
    return LocalFunction(call, applied, f.name)


def _varied(args: tuple[PyTree, ...], dims: Sequence[int | None], axis: str) -> tuple[PyTree, ...]:
    # Each rank maps over its own samples, so gradients taken inside are not summed over the ranks.
    leaves, tree = optree.tree_flatten(args)
    own = [
        pvary(leaf, axis) if dim is None and is_trained(leaf) else leaf for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return tree.unflatten(own)  # type: ignore[no-any-return]


def _of_one(leaf: PyTree, dim: int | None) -> PyTree:
    if dim is None:
        return leaf
    shape = list(leaf.shape)
    del shape[dim]
    return hollow(leaf, shape)


def _with_mapped(spec: P, leaf: PyTree, dim: int | None, axis: str | None) -> P:
    if dim is None:
        return spec
    dim %= leaf.ndim
    dims = [*spec.dims, *[()] * dim]
    padded = {d + (d >= dim): size for d, size in spec.padded.items()}
    return spec.replace([*dims[:dim], axis, *spec.dims[dim:]], padded=padded)


# --- The gradient itself ---


def _gradient_call(argnums: Argnums, has_aux: bool, name: str) -> Callable[..., Any]:
    def call(f: Callable[..., Any], *args: PyTree, **named: PyTree) -> tuple[PyTree, PyTree]:
        register_dataclasses(args, named)
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        leaves, tree = optree.tree_flatten(args)
        owners = [number for number, arg in enumerate(args) for _ in optree.tree_leaves(arg)]
        moving = [i for i, leaf in enumerate(leaves) if owners[i] in numbers and is_trained(leaf)]

        def run(values: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, list[Any]], Any]:
            result = f(*filled(leaves, moving, values, tree), **named)
            if has_aux and not (isinstance(result, tuple) and len(result) == 2):
                raise ValueError(f"has_aux=True: {name} must return (value, aux), not {type(result).__name__}")
            value, aux = result if has_aux else (result, None)
            _check_scalar(value, name)
            register_dataclasses(aux)
            flat_aux, aux_tree = optree.tree_flatten(aux)
            others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat_aux]
            return (value, [leaf for leaf in flat_aux if isinstance(leaf, torch.Tensor)]), (others, aux_tree)

        inputs = [leaves[index] for index in moving]
        active = recorder()
        flat, rest = beside(run)
        with _torch.fused_backwards() if active is not None and not active.is_differentiated else nullcontext():
            gradients, (value, aux) = torch.func.grad_and_value(flat, has_aux=True)(inputs)
        if active is not None and isinstance(active.on_node, Typing):
            _note_unused(active, inputs, gradients)
        by_leaf = dict(zip(moving, gradients, strict=True))
        trees = tree.unflatten([by_leaf.get(index) for index in range(len(leaves))])
        tensors, (others, aux_tree) = iter(aux), rest()
        flat_aux = [next(tensors) if leaf is None else leaf for leaf in others]  # torch.func accepts only tensors
        result = (value, optree.tree_unflatten(aux_tree, flat_aux)) if has_aux else value
        return (trees[argnums] if isinstance(argnums, int) else tuple(trees[number] for number in numbers)), result

    return call


def _run_of(f: LocalFunction, resolved: Resolved) -> tuple[Callable[..., PyTree], Callable[[], SpecTree]]:
    run, specs = beside(partial(f.run, resolved))
    return run if f.applied.axes else forward_first(run), specs  # a partitioned function traces its forward itself


def unused(x: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether a traced gradient is the zeros that torch.func returns for an input without a path to the value."""
    active = recorder()
    if active is None:
        return False
    node, source = active.node_of(_torch.unwrap(gradient)), active.node_of(_torch.unwrap(x))
    return node.target is torch.ops.aten.zeros_like.default and node.args[0] is source


def _note_unused(active: Recorder, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Type the zeros of unused inputs, and record for every input of the trace whether a gradient reaches it."""
    # torch creates these zeros with `zeros_like` of the input, but they must have the type of the gradient.
    for x, gradient in zip(inputs, gradients, strict=True):
        node = active.node_of(_torch.unwrap(x))
        is_unused = unused(x, gradient)
        if is_unused:
            update_info(active.node_of(_torch.unwrap(gradient)), type=dual(type_of(node)))
        while primitive_name(node) == "pcast" or node.target is torch.ops.aten._to_copy.default:
            node = first_operand(node)
        update_info(node, trained=info(node).trained or not is_unused)


# --- Layouts ---


def _derived(
    f: Callable[..., PyTree],
    call: Callable[..., PyTree],
    results: Callable[[Resolved, SpecTree], SpecTree],
    name: str,
) -> Callable[..., PyTree]:
    if not isinstance(f, LocalFunction):
        own = forward_first(f)

        def of_plain(*args: PyTree, **named: PyTree) -> PyTree:
            return call(own, *args, **named)

        return copy_signature(f, of_plain)

    def derived(resolved: Resolved, *args: PyTree) -> tuple[PyTree, SpecTree]:
        run, specs = _run_of(f, resolved)
        return call(run, *args), results(resolved, specs())

    return f.then(derived, describe=name)


def _gradient_specs(resolved: Resolved, argnums: Argnums) -> SpecTree:
    duals = resolved.tree.unflatten(map(P.dual, resolved.specs))
    return duals[argnums] if isinstance(argnums, int) else tuple(duals[number] for number in argnums)


def _name(f: Callable[..., PyTree]) -> str:
    return getattr(f, "__name__", repr(f))


def _check_scalar(value: PyTree, name: str) -> None:
    if not isinstance(value, torch.Tensor) or value.ndim:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"a gradient is taken of a scalar, but {name} returned {found}; "
            "sum or average it, or use has_aux=True for (value, aux)"
        )
