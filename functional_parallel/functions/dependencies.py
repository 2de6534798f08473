"""Python state that the traced forward of a module depends on, or changes.

A program is traced again if an attribute, submodule, buffer, hook, class or mode has changed. Changes by the forward,
and hooks that only have side effects, occur during the trace and in no later step: each causes one warning.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import optree
import torch
from torch import nn

from .. import _torch
from ..errors import MutationError, SideEffectError, SideEffectWarning
from ..ir import current_source, warn_at
from ..tracing import assume
from .snapshot import ABSENT, Snapshot


class Dependencies:
    def __init__(self, module: nn.Module) -> None:
        self._module, self._name = module, type(module).__name__
        self._latest: Snapshot | None = None
        self._passed: frozenset[str] = frozenset()  # names of the tensors that are arguments
        self._written = {  # attributes that a forward changes; those of RNNs follow their parameters
            f"{path}.{name}".lstrip(".")
            for path, each in module.named_modules()
            for name in ("_flat_weights", "_flat_weight_refs")
            if isinstance(each, nn.RNNBase)
        }
        self._warned: set[str] = set()

    @contextmanager
    def recorded(self, passed: Mapping[str, torch.Tensor], trained: Collection[str]) -> Iterator[None]:
        """Record the dependencies of the current trace. The forward may write what is passed and not trained."""
        require_no_gradient_hooks(self._module, self._name)
        params = {name: passed[name] for name in trained if name in passed}
        if self._passed != passed.keys():
            self._latest, self._passed = None, frozenset(passed)
        versions = {name: _versions([each]) for name, each in params.items()}
        before = self._latest if self._latest is not None and self._latest.holds() else self._snapshot()
        hooks = _Hooks(self._module)
        with hooks.watched():
            yield
        for name, each in params.items():
            if versions[name] != _versions([each]):
                raise MutationError(
                    f"{self._name}: the forward writes into the parameter {name}, which a step does not keep: write "
                    "between steps, after step.module(); or compute with a new tensor"
                )
        changes = [*before.changes()]
        for change in changes:
            has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in optree.tree_leaves(change.new))
            is_memo = (change.old is None or change.old is ABSENT) and not has_tensor  # the same at every call
            if change.attribute not in hooks.assigned and not is_memo:
                self._warn(change.attribute, f"{change}, by a forward. Return the value, and pass it in as an argument")
        for name in sorted(hooks.idle - hooks.effective):
            self._warn(name, f"the {name} returns nothing. Return from the loss (has_aux=True) what it records")
        self._written.update(change.attribute for change in changes)
        self._latest = self._snapshot() if changes else before
        assume(self._latest.holds, self._latest.__str__)

    def _snapshot(self) -> Snapshot:
        modules = [*self._module.modules()]
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        constants = [each for name, each in named if name not in self._passed and not each.requires_grad]
        hooks = (*_torch.forward_hooks(self._module), *_torch.gradient_hooks(self._module))
        roots: list[tuple[str, Mapping[Any, Any]]] = [*_attributes_of(self._module), *_classes_of(self._module)]
        roots += [(f"hooks of {path or 'the module'}", each) for path, _, each in hooks]
        return Snapshot(roots, lambda: [*map(type, modules), *map(_memory, constants)], self._written)

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn_at(
                current_source(),
                f"{self._name}: a side effect happened while a step was traced, on tensors without values, and does "
                f"not happen in later steps: {text}",
                SideEffectWarning,
            )


_hooks_are_replaced = threading.RLock()


class _Hooks:
    def __init__(self, module: nn.Module) -> None:
        self._paths = {id(each): path for path, each in module.named_modules()}
        self._found = [(path or "the module", kind, hooks) for path, kind, hooks in _torch.forward_hooks(module)]
        self.assigned = set[str]()  # attributes that hooks have assigned
        self.idle, self.effective = set[str](), set[str]()  # hooks that have changed nothing, and something

    @contextmanager
    def watched(self) -> Iterator[None]:
        with _hooks_are_replaced if any(hooks for *_, hooks in self._found) else nullcontext():
            originals = [(hooks, dict(hooks)) for *_, hooks in self._found]
            for path, kind, hooks in self._found:
                for number, hook in hooks.items():
                    hooks[number] = partial(self._call, hook, f"{kind} {described(hook)} of {path}")
            try:
                yield
            finally:
                for hooks, before in originals:  # a hook may have removed itself
                    hooks.update((number, hook) for number, hook in before.items() if number in hooks)

    def _call(self, hook: Callable[..., Any], name: str, module: nn.Module, *args: Any) -> Any:
        before, versions = dict(vars(module)), _versions(args)
        result = hook(module, *args)
        after, path = vars(module), self._paths.get(id(module), "")
        assigned = [key for key in {**before, **after} if before.get(key) is not after.get(key)]
        self.assigned.update(f"{path}.{key}".lstrip(".") for key in assigned)
        is_a_librarys = str(getattr(hook, "__module__", "")).partition(".")[0] in _LIBRARIES  # uses what it records
        is_idle = result is None and not assigned and not is_a_librarys and versions == _versions(args)
        (self.idle if is_idle else self.effective).add(name)
        return result


def require_no_gradient_hooks(module: nn.Module, name: str) -> None:
    for path, kind, hooks in _torch.gradient_hooks(module):
        for hook in hooks.values():
            raise SideEffectError(
                f"{name}: {path or 'the module'} has the {kind} {described(hook)}. A program computes gradients "
                "without torch's autograd, so it would not be called. Remove it, and write its effect into the "
                "forward, as `w * mask + w.detach() * ~mask` for gradients that are masked; or into the optimizer, as "
                "an fp.optim.Transformation in fp.optim.chain; or use train_step(clip=…) and fp.optim.clip_value"
            )


def described(hook: Callable[..., Any]) -> str:
    inner = inspect.unwrap(hook.func if isinstance(hook, partial) else hook)
    name, code = getattr(inner, "__qualname__", type(inner).__qualname__), getattr(inner, "__code__", None)
    place = f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""
    return f"`{name.rpartition('<locals>.')[2]}`{place}"


def _attributes_of(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, each in module.named_modules():
        own = vars(each)
        yield from ((path, own.get(name, {})) for name in ("_parameters", "_buffers", "_modules"))
        yield path, own


def _classes_of(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    classes = {kind: None for each in module.modules() for kind in type(each).__mro__}
    yield from ((kind.__name__, vars(kind)) for kind in classes if kind.__module__.partition(".")[0] not in _NOT_OPENED)


_LIBRARIES = {"torch", "transformers"}
_NOT_OPENED = {"torch", "builtins", "typing", "abc"}


def _versions(args: Any) -> list[int]:
    tensors = (leaf for leaf in optree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
    return [each._version for each in tensors if not each.is_inference()]


def _memory(x: torch.Tensor) -> tuple[Any, ...]:
    return _torch.address(x), x.shape, x.dtype, x.stride() if x.layout is torch.strided else None
