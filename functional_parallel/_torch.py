"""Every private torch API that the library touches, in one place.

Each name is here because torch offers no public one; `tests/test_private_torch.py` fails loudly when torch moves it.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

try:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)
except ImportError:  # pragma: no cover - an older or newer spelling
    DATA_DEPENDENT_ERRORS = ()

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FAKES",
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "UnsupportedFakeTensor",
    "apart_from_functions",
    "apart_from_modes",
    "apart_from_transforms",
    "backward_node_number",
    "checkpointing",
    "compile_by_inductor",
    "decomposition_of",
    "differentiating_level",
    "direct_call",
    "dispatch_modes",
    "forget_names",
    "forgetting_shapes",
    "functional_variant",
    "fused_adamw_",
    "has_derivative",
    "has_fused_adamw",
    "has_onednn_linear",
    "holds_levels",
    "innermost",
    "is_above_autograd",
    "is_all_true",
    "is_composite",
    "is_functorch_wrapped",
    "is_inside_transform",
    "mapped_dims",
    "needs_higher_derivatives",
    "next_node_number",
    "of_thread",
    "onednn_linear",
    "onednn_mm",
    "reads_no_memory",
    "stride_free",
    "timeout_of_all_ranks",
    "under_transforms",
    "unlogged_fakes",
    "without_constant",
]


T = TypeVar("T")


def of_thread(name: str, make: Callable[[], T]) -> T:
    """An object that each thread has one of, but for those in which autograd runs a backward: theirs is the caller's.

    On CUDA a backward runs in such threads, and what stands around it in the program must hold there too, which
    `threading.local` and context variables do not see to. torch hands these on with the rest of a thread's state.
    """
    key = f"functional_parallel.{name}"
    if not torch._C._is_key_in_tls(key):
        _stash(key, make())
    found: T = torch._C._get_obj_in_tls(key)
    return found


def _stash(key: str, value: object) -> None:
    """Have torch keep an object for this thread. Before 2.12 it lets go of one that it never took hold of."""
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(key, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@contextmanager
def apart_from_transforms() -> Iterator[None]:
    """Set aside active dispatch modes and torch.func levels: what runs inside sees plain tensors."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


def is_above_autograd() -> bool:
    """Whether an op was called where autograd would still see it, though dispatch modes see it already.

    So torch detaches a result that a backward op saves, to save it and each time that it is looked up: it has its
    gradient again then, unlike what a user detaches.
    """
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


@contextmanager
def unlogged_fakes() -> Iterator[None]:
    """What fails on fake tensors inside is raised only: torch also logs it, as twenty lines of its own traceback."""
    silent = of_thread("silent", list)
    silent.append(True)
    try:
        yield
    finally:
        silent.pop()


FAKES = logging.getLogger("torch._subclasses.fake_tensor")
FAKES.addFilter(lambda record: record.levelno != logging.ERROR or not of_thread("silent", list))


@contextmanager
def forgetting_shapes(most: int) -> Iterator[None]:
    """Bound the cache of all fake modes, which holds the result's shape per op and operands and has no bound itself.

    When it has more than `most` entries, what was added inside is dropped again: a kilobyte per entry, which makes a
    second trace of the like faster.
    """
    cache: dict[Any, Any] = getattr(FakeTensorMode, "cache", {})
    known = set(cache)
    try:
        yield
    finally:
        for key in list(cache) if len(cache) > most else ():
            if key not in known:
                cache.pop(key, None)


def forget_names(graph: torch.fx.Graph) -> None:
    """Let a graph forget the names it gave, and with them the nodes that were erased: new nodes may be called alike."""
    graph._graph_namespace = type(graph._graph_namespace)()


apart_from_modes = _disable_current_modes  # set aside active dispatch modes only

apart_from_functions = torch._C.DisableTorchFunction  # and those that see torch's functions


is_all_true = torch._is_all_true  # what torch.distributions ask about values, under vmap too


def dispatch_modes() -> list[TorchDispatchMode]:
    """The active dispatch modes, innermost last: this thread's; in one of autograd's, those of its caller."""
    return _get_current_dispatch_mode_stack()


def backward_node_number() -> int | None:
    """The number of the autograd node whose backward is running now, which its forward got from `next_node_number`."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def next_node_number() -> int:
    """The number that the next autograd node of this thread will carry."""
    return torch._C._autograd._get_sequence_nr()


def differentiating_level() -> int:
    """How many torch.func levels that differentiate (grad, vjp, jvp) are active here."""
    stack = torch._C._functorch.get_interpreter_stack()
    differentiating = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return 0 if stack is None else sum(level.key() in differentiating for level in stack)


def is_inside_transform() -> bool:
    """Whether some torch.func level is active here."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor belongs to a torch.func level (a gradient-tracking or batched wrapper)."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def holds_levels(tensors: Sequence[Any]) -> bool:
    """Whether some tensor takes part in a derivative or a vmap."""
    inside, recorded = is_inside_transform(), torch.is_grad_enabled()
    found = (x for x in tensors if isinstance(x, torch.Tensor))
    return any((recorded and x.requires_grad) or (inside and is_functorch_wrapped(x)) for x in found)


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside all torch.func wrappers."""
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def without_constant(fake: torch.Tensor) -> torch.Tensor:
    """A fake without torch's note of its value, which a trace's writes in place would not change."""
    if isinstance(fake, FakeTensor):
        fake.constant = None
    return fake


def mapped_dims(tensor: torch.Tensor) -> list[int]:
    """The dims of the plain tensor inside that vmap levels map, each counted without those before it."""
    functorch, found = torch._C._functorch, []
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            found.append(functorch.maybe_get_bdim(tensor))
        tensor = functorch.get_unwrapped(tensor)
    return found[::-1]


def functional_variant(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The out-of-place twin of an in-place op (`aten.add_.Tensor` → `aten.add.Tensor`), or of one with `out=`, or None.

    Where it has another overload's name it is the one of the same arguments (`aten.transpose_` → `aten.transpose.int`).
    """
    name = op._schema.name.split("::")[1]
    has_out = [argument.name for argument in op._schema.arguments if argument.is_out] == ["out"]
    packet = getattr(torch.ops.aten, name if has_out else name[:-1], None) if has_out or name.endswith("_") else None
    if packet is None:
        return None
    overloads = [getattr(packet, each) for each in sorted(packet.overloads(), key=lambda e: e != op._overloadname)]
    return next((each for each in overloads if each is not op and _taken(each) == _taken(op)), None)


def decomposition_of(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """What torch writes an op as in terms of simpler ones, or None."""
    from torch._decomp import decomposition_table  # which takes a while, and few ask

    return decomposition_table.get(op)


def has_derivative(op: torch._ops.OpOverload) -> bool:
    """Whether autograd knows an op; of what one without makes, torch.func takes the gradient for zero."""
    names = ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradOther", "CompositeImplicitAutograd")
    keys = (getattr(torch._C.DispatchKey, name) for name in names)
    return op.namespace in ("aten", "prims") or any(map(op.has_kernel_for_dispatch_key, keys))


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether one of torch's ops is made of others alone; called beneath autograd, nobody has taken it apart yet."""
    return op.namespace == "aten" and op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _taken(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    """Names and types of an op's arguments, without those that are there for its results."""
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments if not argument.is_out]


def needs_higher_derivatives() -> bool:
    """Whether a forward-mode or a second derivative is being taken here, which fused kernels do not have."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    keys = [level.key() for level in stack]
    kinds = torch._C._functorch.TransformType
    return kinds.Jvp in keys or keys.count(kinds.Grad) > 1


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default}


def stride_free(op: Any) -> Any:
    """The op to run for a traced one: what was traced on contiguous fakes may meet a tensor that lies otherwise.

    A view cannot be made of it then; and attention's kernels, which torch chooses only for operands whose rows are in
    one piece, would read beside them.
    """
    return torch.ops.aten.reshape.default if op in _VIEWS else _OF_ROWS.get(op, op)


def _on_rows(op: Any) -> Callable[..., Any]:
    def row(x: Any) -> Any:
        scattered = isinstance(x, torch.Tensor) and x.ndim > 2 and x.shape[-1] > 1 and x.stride(-1) != 1
        return x.contiguous() if scattered else x

    return lambda *args, **kwargs: op(*map(row, args), **{name: row(x) for name, x in kwargs.items()})


_OF_ROWS = {
    getattr(torch.ops.aten, name).default: _on_rows(getattr(torch.ops.aten, name).default)
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    for name in (f"_scaled_dot_product_{kernel}", f"_scaled_dot_product_{kernel}_backward")
    if hasattr(torch.ops.aten, name)
}


def reads_no_memory(error: Exception) -> bool:
    """Whether a function of torch's in C++ wanted the memory of a tensor that has none, being a fake."""
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _NO_MEMORY)


_NO_MEMORY = ("its data is not allocated yet", "Cannot access data pointer of Tensor that doesn't have storage")


def under_transforms(op: Any) -> Any:
    """The op to run for a traced one where torch.func may look on, which cannot map a product into a sum in place."""
    return functional_variant(op) if op is torch.ops.aten.addmm_.default else stride_free(op)


def direct_call(op: object) -> Any:
    """What an op's Python object calls into, without the Python frame around it."""
    return getattr(op, "_op", op) if isinstance(op, torch._ops.OpOverload) else op


_ONEDNN_LINEAR: Any = (
    direct_call(torch.ops.mkldnn._linear_pointwise.default) if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None
)


def has_onednn_linear() -> bool:
    """Whether oneDNN's matrix product of float32 is there, switched on, and an alternative to MKL's."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
        and _ONEDNN_LINEAR is not None
    )


def onednn_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`torch.mm` of float32 by oneDNN, on tensors that nothing differentiates."""
    return onednn_linear(a, b.t())


def onednn_linear(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`a @ w.t()` of float32 by oneDNN, on tensors that nothing differentiates."""
    if not a.is_cpu:
        return torch.mm(a, w.t())
    return _ONEDNN_LINEAR(a, w, None, "none", [], "")  # type: ignore[no-any-return]


def has_fused_adamw(parameter: torch.Tensor) -> bool:
    """Whether torch's fused AdamW kernel serves this parameter."""
    return (
        hasattr(torch, "_fused_adamw_")
        and parameter.device.type in ("cpu", "cuda")
        and parameter.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    )


def fused_adamw_(
    p: list[torch.Tensor],
    g: list[torch.Tensor],
    m: list[torch.Tensor],
    v: list[torch.Tensor],
    step: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    """torch's fused AdamW on many parameters, in place; `step` counts this update."""
    options: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    torch._fused_adamw_(p, g, m, v, [], [step] * len(p), lr=lr, amsgrad=False, maximize=False, **options)


@contextmanager
def checkpointing(region: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Let `torch.utils.checkpoint.checkpoint` call its function plainly, inside `region(name)`.

    Its own ways, an autograd.Function and hooks on saved tensors, do not go through torch.func. Models hold references
    to `checkpoint`, so the two names that it looks up when called are what is replaced, for all threads as long as some
    thread is inside; those that are not go torch's way.
    """
    regions = _regions()
    regions.append(region)
    _checkpoints.enter()
    try:
        yield
    finally:
        _checkpoints.leave()
        regions.pop()


def _regions() -> list[Callable[[str], AbstractContextManager[None]]]:
    return of_thread("checkpointing", list)


class _Checkpoints:
    """The two names, and how many ask for them to be replaced."""

    def __init__(self) -> None:
        self._torchs: tuple[Any, Any] = (None, None)
        self._lock, self._inside = threading.Lock(), 0

    def enter(self) -> None:
        module = torch.utils.checkpoint
        with self._lock:
            if not self._inside:
                self._torchs = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
                self._put(self, self.generator)
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._put(*self._torchs)

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        regions = _regions()
        if not regions:
            return self._torchs[0].apply(function, preserve, *args)
        with regions[-1]("checkpoint"):
            return function(*args)

    def generator(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        regions = _regions()
        if not regions:
            yield from self._torchs[1](function, *args, **kwargs)
            return
        with regions[-1]("checkpoint"):
            yield

    def _put(self, function: Any, generator: Any) -> None:
        module = torch.utils.checkpoint
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = function, generator  # type: ignore[misc]


_checkpoints = _Checkpoints()


def timeout_of_all_ranks() -> timedelta | None:
    """After how long collectives of the process group of all ranks fail; None where its backend does not say."""
    world = torch.distributed.group.WORLD
    assert world is not None, "nobody has initialised torch.distributed"
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):  # no backend for this device, or one without options, as mpi
            return world._get_backend(torch.device(device)).options._timeout  # type: ignore[no-any-return]
    return None


def compile_by_inductor(
    module: torch.fx.GraphModule, operands: Sequence[torch.Tensor]
) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a graph of aten ops that writes nothing and that nothing differentiates, for these shapes and strides.

    `torch.compile` would trace it once more, by dynamo, and guard on what cannot change.
    """
    import torch._inductor as inductor  # takes a second, and few programs need it

    with apart_from_transforms(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own modules, when they are imported
        with FakeTensorMode():  # of each its own: where one tensor comes twice, inductor would take that for a rule
            like: list[Any] = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in operands
            ]
        return inductor.compile(module, like)  # type: ignore[no-any-return]
