"""An `nn.Module` as a pure function over its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Literal, overload

import torch
from torch import nn

from ..collectives import check_callable
from ..quantities import is_positive_int
from ..tracing import is_kept, stand_ins
from .batch_groups import BatchSplit
from .batch_norms import as_batch_norms, holds_batch_norms, require_no_group
from .dependencies import Dependencies
from .foreign import require_module
from .request import PyTree

Tensors = dict[str, torch.Tensor]  # by dotted path
Model = Callable[..., PyTree]
Groups = tuple[int, int] | BatchSplit | None

_META = torch.device("meta")


@overload
def functional(
    module: nn.Module, *, buffers: Literal[False] = False, groups: Groups = None
) -> tuple[Model, Tensors]: ...
@overload
def functional(
    module: nn.Module, *, buffers: Literal[True], groups: Groups = None
) -> tuple[Model, Tensors, Tensors]: ...
def functional(
    module: nn.Module, *, buffers: bool = False, groups: Groups = None
) -> tuple[Model, Tensors] | tuple[Model, Tensors, Tensors]:
    """Turn a module into a pure function and its parameters.

    >>> import torch, functional_parallel as fp
    >>> fn, params = fp.functional(torch.nn.Linear(2, 1))
    >>> sorted(params), fn(params, torch.ones(3, 2)).shape
    (['bias', 'weight'], torch.Size([3, 1]))

    Args:
        module: any module, including Hugging Face models. It is not changed. Its mode (train or eval), attributes,
            submodules, buffers and forward hooks at the time of the call are used. This also holds for compiled
            functions, which are traced again if one of these has changed.
        buffers: whether to pass buffers in and out as state. The running statistics of batch norm need this in
            training. Batch norm and `nn.SyncBatchNorm` use the statistics of the global batch.
        groups: numbers of ranks and of microbatches per rank, `(ranks, microbatches)`, to normalise as torch does on
            them. A batch norm in training uses the statistics of each microbatch of each rank, and `nn.SyncBatchNorm`
            the statistics of a microbatch of all ranks. The running statistics follow the microbatches of
            the first rank.

    Returns:
        `(fn, params)` with `fn(params, *args, **kwargs)`. With `buffers`, `(fn, params, state)` with
        `fn(params, state, *args, **kwargs)` returning `(result, new_state)`. Parameters are keyed by dotted path; a
        tied weight is one leaf. A frozen parameter (`requires_grad=False`) is not in `params`. It is not trained, and
        is a constant that is replicated on all ranks. If all are frozen, as for inference, all are in `params`.
        `fn.module` is the module.

    Raises:
        TypeError: if `module` is not a module.
        ForeignCollectiveError: for a DDP or FSDP module, because torch.func does not see its hidden hooks.
        ValueError: for a `SyncBatchNorm` over only some ranks, and `groups` that are not two numbers. When the function
            is run, if buffers or frozen parameters of the module are on the meta device but the passed parameters are
            not. Lowering accepts them.
        SideEffectError: when the function is traced, if the module or a parameter has a hook on gradients.
    """
    require_module(module, "fp.functional")
    check_callable(module)
    require_no_group(module)
    every = dict(module.named_parameters())
    trained = {name: parameter for name, parameter in every.items() if parameter.requires_grad} or every
    params = {name: parameter.detach() for name, parameter in trained.items()}
    state = {name: buffer.detach() for name, buffer in module.named_buffers()}
    if isinstance(groups, tuple) and (len(groups) != 2 or not all(map(is_positive_int, groups))):
        raise ValueError(f"fp.functional(groups={groups!r}): give the numbers (ranks, microbatches)")
    split = BatchSplit(*groups) if isinstance(groups, tuple) else groups
    norms = partial(as_batch_norms, split) if split is not None or holds_batch_norms(module) else nullcontext
    dependencies = Dependencies(module)
    constant = {name: tensor for name, tensor in {**every, **state}.items() if name not in params}
    valueless = {name: tensor for name, tensor in constant.items() if tensor.is_meta}

    def constants() -> Tensors:
        held = (*module.named_parameters(), *module.named_buffers())
        now = {name: tensor.detach() for name, tensor in held if name not in params}
        return {name: constant.get(name, each) if each.is_meta else each for name, each in now.items()}

    def run(tensors: Tensors, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> PyTree:
        passed = dict(tensors)
        tensors.update((name, tensor) for name, tensor in constants().items() if name not in tensors)
        tensors.update((other, tensors[name]) for other, name in _tied(module) if name in tensors)
        with norms(), dependencies.recorded(passed, params) if is_kept() else nullcontext():
            return torch.func.functional_call(module, tensors, args, kwargs, tie_weights=False)

    def fn(params: Tensors, *args: PyTree, **kwargs: PyTree) -> PyTree:
        given = [leaf for leaf in params.values() if isinstance(leaf, torch.Tensor)] if valueless else []
        if not any(leaf.device == _META for leaf in given):
            device = given[0].device if given else torch.get_default_device()
            params = {**stand_ins(valueless, device, type(module).__name__), **params}
        return run(dict(params), args, kwargs)

    def fn_of_state(params: Tensors, state: Tensors, *args: PyTree, **kwargs: PyTree) -> PyTree:
        tensors = {**params, **{name: buffer.clone() for name, buffer in state.items()}}
        result = run(tensors, args, kwargs)
        return result, {name: tensors[name] for name in state}  # a forward may have assigned new ones

    fn.__name__ = fn_of_state.__name__ = type(module).__name__
    fn.module = fn_of_state.module = module  # type: ignore[attr-defined]
    return (fn_of_state, params, state) if buffers else (fn, params)


def _tied(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Iterate over the other names of tied parameters and buffers, each with the first name.

    torch ties the names of one module that is used at several places too, and then leaves the tensors of a call in it.
    """
    first: dict[int, str] = {}
    for path, each in module.named_modules():
        for name, tensor in (*each._parameters.items(), *each._buffers.items()):
            if tensor is not None:
                full = f"{path}.{name}".lstrip(".")
                if (known := first.setdefault(id(tensor), full)) != full:
                    yield full, known
