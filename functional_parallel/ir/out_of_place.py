"""Out-of-place forms of custom ops that write into arguments, made from their schemas.

`mylib::scale_(Tensor(a!) x, float s) -> ()` becomes `mylib::scale__out_of_place(Tensor x, float s) -> Tensor[]`. The
form clones the written operands, calls the op on the clones, and returns the op's new tensors and then the clones.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch

from .. import _torch
from ..collectives import keeping_grad_mode
from ..errors import CustomFunctionError, MutationError
from .graph import Args, Kwargs, named_arguments
from .source import current_source
from .stand_ins import declare_origin, differentiable_form


class OutOfPlace(NamedTuple):
    """Out-of-place form of an op. `written` are the names of the arguments that the op writes."""

    origin: _torch.Op
    op: _torch.Op
    written: tuple[str, ...]

    def targets(self, given: Mapping[str, Any]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = optree.tree_leaves([given.get(name) for name in self.written])
        return found

    def call(
        self, run: Callable[..., Any], write: Callable[[torch.Tensor, torch.Tensor], Any], args: Args, kwargs: Kwargs
    ) -> Any:
        """Call a function like the form, write each new value into its tensor, and return what the op returns."""
        given = named_arguments(self.origin, args, kwargs)
        targets, results = self.targets(given), run(*args, **kwargs)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        count = len(results) - len(targets)
        for target, value in zip(targets, results[count:], strict=True):
            write(target, value)
        names = [_returned(self.origin, index) for index in range(len(self.origin._schema.returns))]
        fresh = iter(results[:count])
        returned = tuple(next(fresh) if name is None else given[name] for name in names)
        return returned[0] if len(returned) == 1 else returned or None


def declares_writes(op: Any) -> bool:
    is_op = isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable
    return is_op and op.namespace not in ("aten", "prims")


def write_by_copies(op: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call an op by its differentiable form and copy the new values, under a derivative or a vmap."""
    form = out_of_place(op)
    function = differentiable_form(form.op)
    assert function is not None
    return form.call(function, torch.Tensor.copy_, args, kwargs)


_lock = threading.Lock()
_forms: dict[_torch.Op, OutOfPlace] = {}
_libraries: dict[str, torch.library.Library] = {}


def out_of_place(op: _torch.Op) -> OutOfPlace:
    """Return the out-of-place form of an op. Raise if the op returns anything but tensors that are new or written."""
    with _lock:
        if op not in _forms:
            _forms[op] = _made(op)
        return _forms[op]


def _made(op: _torch.Op) -> OutOfPlace:
    schema = op._schema
    written = tuple(each.name for each in schema.arguments if each.alias_info and each.alias_info.is_write)
    kinds = [str(each.type) for each in schema.returns]
    if any(kind != "Tensor" for kind in kinds) or any(_returned(op, index) == "" for index in range(len(kinds))):
        raise MutationError(
            f"{current_source()}: {op} writes into {', '.join(written)}, and returns something else than new tensors "
            f"or what it writes: {schema}; let it return new tensors only"
        )
    namespace, overload = op.namespace, "" if op._overloadname == "default" else f"_{op._overloadname}"
    name = f"{schema.name.partition('::')[2]}{overload}_out_of_place"
    taken = re.sub(r"[(]\w+!?[)]", "", str(schema).partition("(")[2].rpartition(" -> ")[0])
    library = _libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    library.define(f"{name}({taken} -> Tensor[]", tags=tuple(op.tags))
    kernel = _kernel(op, written)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::{name}", kernel, lib=library)
    form = getattr(getattr(torch.ops, namespace), name).default
    declare_origin(form, op, _refusing(form, op))
    return OutOfPlace(op, form, written)


def _returned(op: _torch.Op, index: int) -> str | None:
    """Return the name of the written argument that a result is; None for a new tensor, "" for any other view."""
    alias = op._schema.returns[index].alias_info
    if alias is None:
        return None
    found = (
        each.name
        for each in op._schema.arguments
        if each.alias_info
        and each.alias_info.is_write
        and each.alias_info.before_set == alias.before_set
        and str(each.type) == "Tensor"
    )
    return next(found, "")


def _kernel(op: _torch.Op, written: tuple[str, ...]) -> Callable[..., list[torch.Tensor]]:
    new = [index for index in range(len(op._schema.returns)) if _returned(op, index) is None]

    def kernel(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = named_arguments(op, args, kwargs)
        clones = {name: optree.tree_map(torch.clone, given[name]) for name in written if name in given}
        results = op(**{**given, **clones})
        results = results if isinstance(results, tuple) else (results,)
        return [*(results[index] for index in new), *optree.tree_leaves(list(clones.values()))]

    return kernel


class _WithoutDerivative(torch.autograd.Function):
    @staticmethod
    def forward(call: Callable[..., list[torch.Tensor]], op: _torch.Op, *tensors: torch.Tensor) -> Any:
        return tuple(call(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, ctx.where = inputs[1], current_source()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        raise CustomFunctionError(
            f"{ctx.where}: {ctx.op} writes into an argument and has no derivative, which the gradient through what it "
            f"writes needs: give it one, fp.register_rule(torch.ops.{ctx.op}, '… -> …', function=f), where f returns "
            "the op's new tensors and then the written ones, see docs/rules.md; or detach what it writes"
        )

    jvp = backward

    @staticmethod
    def vmap(info: _torch.VmapInfo, in_dims: _torch.InDims, call: Any, op: _torch.Op, *tensors: torch.Tensor) -> Any:
        def one(row: int) -> Any:
            own = [x if dim is None else x.select(dim, row) for x, dim in zip(tensors, in_dims[2:], strict=True)]
            return _WithoutDerivative.apply(call, op, *own)  # type: ignore[no-untyped-call]

        results = [torch.stack(column) for column in zip(*map(one, range(info.batch_size)), strict=True)]
        return tuple(results), (0,) * len(results)


def _refusing(form: _torch.Op, op: _torch.Op) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = optree.tree_flatten((args, kwargs))
        where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(*tensors: torch.Tensor) -> Any:
            filled = list(leaves)
            for index, tensor in zip(where, tensors, strict=True):
                filled[index] = tensor
            given, named = tree.unflatten(filled)
            return form(*given, **named)

        with keeping_grad_mode():
            tensors = [leaves[index] for index in where]
            return _WithoutDerivative.apply(call, op, *tensors)  # type: ignore[no-untyped-call]

    return function
