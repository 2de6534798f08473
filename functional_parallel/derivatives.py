"""torch.func's transforms, with the layout carried and every pytree flattened by optree.

`fp.grad(f)` is `torch.func.grad(f)` in three settings: of a local function it returns a local function, whose layout says
how the gradients lie; inside a `shard_map` body it first traces and types what it differentiates, so that an Invariant
value that meets a Varying one is cast where AD can see it; of any other function it only adds that leaves which are not
floating are passed by instead of refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import optree
import torch
from sharding_specs import P

from .collectives.axes import current_axes
from .local_function import LocalFunction, PyTree
from .tracing.graph import aval_of
from .tracing.record import Recorder, recorder, trace
from .varying import Typing, run_typed

__all__ = ["grad", "grad_and_value", "hessian", "jvp"]

Argnums = int | Sequence[int]


def grad_and_value(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Gradients and value of a scalar function: `grads, value = grad_and_value(f)(params, batch)`.

    >>> import torch, functional_parallel as fp
    >>> fp.grad_and_value(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0]), "steps": 3})
    ({'steps': None, 'w': tensor([2., 4.])}, tensor(5.))

    Args:
        f: returns a scalar tensor, or (with `has_aux`) a scalar and anything else.
        argnums: the argument, or arguments, to differentiate by; any optree pytrees.
        has_aux: whether f returns `(value, aux)`.

    Returns:
        A function that returns `(gradients, value)` or `(gradients, (value, aux))`. Gradients have the argument's tree;
        a leaf that is not a floating tensor has None. A local function yields a local function.
    """
    call = _gradient_call(f, argnums, has_aux)
    if not isinstance(f, LocalFunction):
        return call
    return _local(f, call, lambda args: (_gradient_specs(f, args, argnums), f.results), "grad_and_value")


def grad(f: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Gradients of a scalar function; see `grad_and_value`.

    >>> import torch, functional_parallel as fp
    >>> fp.grad(lambda x: (x ** 3).sum())(torch.tensor([2.0]))
    tensor([12.])

    Args:
        f, argnums, has_aux: as for `grad_and_value`.

    Returns:
        A function that returns the gradients, or `(gradients, aux)`.
    """
    both = _gradient_call(f, argnums, has_aux)

    def gradients(*args: PyTree) -> Any:
        grads, value = both(*args)
        return (grads, value[1]) if has_aux else grads

    def specs(args: tuple[PyTree, ...]) -> Any:
        own = _gradient_specs(f, args, argnums)  # type: ignore[arg-type]
        return (own, f.results[1]) if has_aux else own  # type: ignore[attr-defined]

    return _local(f, gradients, specs, "grad") if isinstance(f, LocalFunction) else gradients


def hessian(f: Callable[..., Any], argnums: int = 0) -> Callable[..., Any]:
    """Second derivatives of a scalar function of one tensor: forward over reverse.

    >>> import torch, functional_parallel as fp
    >>> fp.hessian(lambda x: (x ** 3).sum())(torch.tensor([1.0, 2.0]))
    tensor([[ 6.,  0.],
            [ 0., 12.]])

    Args:
        f: returns a scalar tensor.
        argnums: the argument to differentiate by; one tensor.

    Returns:
        A function of the same arguments; its result has the argument's dims twice.
    """
    call = torch.func.hessian(f, argnums)
    if not isinstance(f, LocalFunction):
        return call

    def results(args: tuple[PyTree, ...]) -> P:
        spec = f.layout.arguments(args)[argnums]
        if not isinstance(spec, P) or spec.axes:
            raise ValueError(
                f"fp.hessian by a sharded or structured argument ({spec}): each rank would hold some blocks of the "
                "matrix only; keep that argument one whole tensor, or take fp.jvp of fp.grad for products with a vector"
            )
        return P()

    return _local(f, call, results, "hessian")


def jvp(f: Callable[..., Any], primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
    """Value and directional derivative, `torch.func.jvp` on optree pytrees.

    >>> import torch, functional_parallel as fp
    >>> fp.jvp(lambda x: (x ** 2).sum(), (torch.tensor([3.0]),), (torch.tensor([1.0]),))
    (tensor(9.), tensor(6.))

    Args:
        f: any function, local ones included.
        primals: its arguments.
        tangents: the direction, of the same trees; leaves beside non-floating primals are ignored.
    """
    leaves, tree = optree.tree_flatten(primals)
    directions = tree.flatten_up_to(tangents)
    moving = [index for index, leaf in enumerate(leaves) if _is_floating(leaf)]
    found: dict[str, Any] = {}

    def flat(*values: torch.Tensor) -> tuple[Any, ...]:
        outputs, found["tree"] = optree.tree_flatten(f(*_filled(leaves, moving, values, tree)))
        return tuple(outputs)

    values, derivatives = torch.func.jvp(
        flat, tuple(leaves[index] for index in moving), tuple(directions[index] for index in moving)
    )
    return optree.tree_unflatten(found["tree"], values), optree.tree_unflatten(found["tree"], derivatives)


# -----------------------------------------------------------------------------
# The gradient itself
# -----------------------------------------------------------------------------


def _gradient_call(f: Callable[..., Any], argnums: Argnums, has_aux: bool) -> Callable[..., Any]:
    def call(*args: PyTree) -> Any:
        numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        leaves, tree = optree.tree_flatten(tuple(args[number] for number in numbers))
        moving = [index for index, leaf in enumerate(leaves) if _is_floating(leaf)]
        found: dict[str, Any] = {}

        def flat(values: list[torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
            rest = list(args)
            for number, argument in zip(numbers, _filled(leaves, moving, values, tree), strict=True):
                rest[number] = argument
            result = f(*rest)
            value, aux = result if has_aux else (result, None)
            _check_scalar(value, f)
            flat_aux, found["tree"] = optree.tree_flatten(aux)
            return value, flat_aux

        inputs = [leaves[index] for index in moving]
        active = recorder()
        in_body = active is not None and isinstance(active.on_node, Typing) and not isinstance(f, LocalFunction)
        body = _typed(flat, inputs, active) if active is not None and in_body else flat
        gradients, (value, aux) = torch.func.grad_and_value(body, has_aux=True)(inputs)
        whole: list[Any] = [None] * len(leaves)
        for index, gradient in zip(moving, gradients, strict=True):
            whole[index] = gradient
        trees = tree.unflatten(whole)
        result = (value, optree.tree_unflatten(found["tree"], aux)) if has_aux else value
        return (trees[0] if isinstance(argnums, int) else trees), result

    return call


def _typed(
    flat: Callable[[list[torch.Tensor]], tuple[torch.Tensor, list[Any]]], values: list[torch.Tensor], active: Recorder
) -> Callable[[list[torch.Tensor]], tuple[torch.Tensor, list[Any]]]:
    """The same function, to be run from its typed trace with every implied cast written in."""
    traced = trace(
        lambda *inputs: _joined(*flat(list(inputs))),
        [aval_of(value) for value in values],
        types=[active.node_of(value).meta["type"] for value in values],
        on_node=Typing(current_axes()),
    )

    def run(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
        outputs = run_typed(traced, [*inputs, *traced.captured])
        return outputs[0], outputs[1:]

    return run


def _joined(value: torch.Tensor, aux: list[Any]) -> list[Any]:
    return [value, *aux]


# -----------------------------------------------------------------------------
# Layouts
# -----------------------------------------------------------------------------


def _local(f: LocalFunction, call: Callable[..., Any], results: Callable[[tuple[PyTree, ...]], Any], name: str) -> Any:
    layout = replace(f.layout, describe=(*f.layout.describe, name))
    return LocalFunction(lambda *args: (call(*args), results(args)), layout, f.name)


def _gradient_specs(f: LocalFunction, args: tuple[PyTree, ...], argnums: Argnums) -> Any:
    """Gradients lie as what they belong to, but Reduced becomes Unreduced."""
    specs = f.layout.arguments(args)
    duals = [optree.tree_map(_dual, spec, is_leaf=_is_spec) for spec in specs]
    return duals[argnums] if isinstance(argnums, int) else tuple(duals[number] for number in argnums)


def _dual(spec: P) -> P:
    return spec.dual()


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


# -----------------------------------------------------------------------------
# Leaves
# -----------------------------------------------------------------------------


def _filled(leaves: list[Any], moving: list[int], values: Sequence[Any], tree: Any) -> Any:
    whole = list(leaves)
    for index, value in zip(moving, values, strict=True):
        whole[index] = value
    return tree.unflatten(whole)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _check_scalar(value: Any, f: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.ndim:
        found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"a gradient is taken of a scalar, but {getattr(f, '__name__', f)} returned {found}; "
            "sum or average it, or use has_aux=True for (value, aux)"
        )
