"""Record a function on fake tensors, op by op, below autograd and below torch.func.

torch's make_fx is similar. However, it omits source lines, is slower, and cannot return the type of a value while the
function still runs. Recording is one dispatch mode. It receives each aten op after autograd, vmap and composite ops
have been applied, runs it on fake tensors, and writes one node.

Traps it guards against:

- in-place ops, which are recorded as their functional variants
- tensors of an enclosing trace, which are captured as extra inputs
- a user's `autograd.Function`, which would lose its backward
- values read back into Python
- in-place torch.distributed calls, which are refused (see `collectives.guards`)
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import lru_cache
from types import FrameType, NotImplementedType
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from .. import _torch
from ..collectives import check_op, current_axes, fake_kernel, gradients_at_call, trace_only
from ..errors import CustomFunctionError, TracingError
from ..ir import (
    VIEWS,
    Args,
    Aval,
    Kwargs,
    Traced,
    count_stage_boundaries,
    current_source,
    differentiable_form,
    named_arguments,
    operands_of,
    raising_source,
    recompute_region,
    topological_order,
)
from .assumptions import assume
from .constant_folding import asks_for_values, draws, fold_constants
from .control_flow import unrolled
from .devices import require_one_device
from .enclosing import CapturedTensors
from .interception import Interception, Replaced, replacement_of
from .mutation import mutate
from .strided import strided
from .switches import in_trace_without_gradient, no_gradient_is_wanted
from .writer import TraceWriter

aten = torch.ops.aten

_PACKAGE = __name__.split(".")[0]
_DEVICE = torch.ops.prim.device.default


def trace(
    fn: Callable[..., Sequence[Any]],
    inputs: Sequence[Aval],
    *,
    types: Sequence[Any] | None = None,
    forward_only: bool = False,
    on_node: Callable[[fx.Node], None] | None = None,
    is_local_body: bool = False,
    paths: Sequence[str] = (),
) -> Traced:
    """Record `fn(*tensors) -> flat sequence of outputs` on fake tensors of the given shapes.

    The graph lacks the nodes that no output needs.

    Args:
        fn: takes one tensor per input; returns a flat sequence of tensors and Python values.
        inputs: shape, dtype and device of each argument.
        types: type of each input, for an `on_node` that infers types.
        forward_only: whether the graph will be differentiated later. Code that would hide a derivative is refused.
        on_node: called with every op node right after it is recorded.
        is_local_body: whether the function computes on shards and calls its collectives explicitly.
        paths: pytree path of each input, for messages.
    """
    outer = recorder()
    enclosed = CapturedTensors(fn)
    mode = outer.fake_mode if outer is not None else _torch.FakeTensorMode(allow_non_fake_inputs=True)
    with _torch.disable_functorch(), trace_only(), torch.inference_mode(False), torch.enable_grad():
        recording = Recorder(mode, forward_only, on_node, outer, is_local_body)
        with mode:
            arguments = [recording.results.empty(a.shape, a.dtype, a.device) for a in inputs]
        recording.start(arguments, types, paths)
        with ExitStack() as stack:
            alone = forward_only and (on_node is None or is_local_body)  # a region's body may be partitioned
            stack.enter_context(Interception(alone, enclosed, recording.layouts))
            stack.enter_context(_torch.checkpointing(recompute_region))
            stack.enter_context(count_stage_boundaries())
            stack.enter_context(_torch.unlogged_fakes())
            stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it would read values
            stack.enter_context(mode)
            stack.enter_context(recording)
            outputs = _call(fn, arguments)
        return recording.finish(outputs)


def needs_values(error: Exception) -> bool:
    if isinstance(error, TracingError):
        return True
    return isinstance(error, _torch.DATA_DEPENDENT_ERRORS) or _torch.reads_no_memory(error)


def _call(fn: Callable[..., Sequence[Any]], arguments: list[torch.Tensor]) -> Sequence[Any]:
    try:
        return fn(*arguments)
    except Exception as error:
        if isinstance(error, TracingError) or not needs_values(error):
            raise
        raise TracingError(
            f"{raising_source(error) or 'the function'}: {getattr(error, 'func', 'an op')} needs a tensor's values "
            "(`.item()`, `if tensor:`, a boolean index), which a traced function does not have; "
            f"{_way_out(error)}"
        ) from error


_ASKED_BY_TORCH = {  # library functions that read values where the user's line does not show it
    "torch.nn.modules.transformer._detect_is_causal_mask": "torch reads the mask to detect a causal mask; "
    "pass is_causal=True or False to an nn.TransformerEncoder, tgt_is_causal= to a decoder",
    "torch.distributions.distribution.__init__": "torch checks the distribution's parameters; give it "
    "validate_args=False",
    **dict.fromkeys(
        [f"transformers.masking_utils._ignore_{kind}_mask_sdpa" for kind in ("causal", "bidirectional")],
        "transformers reads the attention mask where a transform of torch.func hides the trace; use fp.grad, fp.vmap "
        "or fp.jvp instead of it",
    ),
}


def _way_out(error: Exception) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(map(_is_loop_over_experts, frames)):
        return (
            "transformers' eager experts loop over the experts that some token has chosen; "
            "model.set_experts_implementation('grouped_mm') computes them without a loop"
        )
    passed = (f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}" for frame in frames)
    return next(filter(None, map(_ASKED_BY_TORCH.get, passed)), "write it with torch.where or fixed shapes")


def _is_loop_over_experts(frame: FrameType) -> bool:
    owner = type(frame.f_locals.get("self"))
    return owner.__module__.startswith("transformers.") and owner.__name__.endswith("Experts")


def recorder() -> Recorder | None:
    """Return the innermost recording that receives the ops of this thread, or None.

    It is one of the dispatch modes. Autograd passes these to its threads, for example for a backward on CUDA. A thread
    that the user starts has no dispatch modes, and can trace independently.
    """
    recordings = (mode for mode in reversed(_torch.dispatch_modes()) if isinstance(mode, Recorder))
    return next(recordings, None)


class Recorder(TraceWriter):
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: _torch.Op | _torch.HigherOrderOp,
        types: Sequence[type],
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Argument:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], _torch.FakeTensor):  # half of all calls, by autograd
            return args[0].fake_device
        if not isinstance(func, torch._ops.OpOverload):
            return unrolled(self, func, args, kwargs)
        replacement = replacement_of(func)
        is_usual = replacement is None and not (self.zeros or self._is_unrolling or torch.is_inference_mode_enabled())
        if not (is_usual and _is_usual(func)):
            result = self._unusual(func, args, kwargs, replacement)
            if result is not NotImplemented:
                return result
        is_own = func.namespace == "fp"
        try:
            state = tuple(current_axes().items()) if is_own else None  # sizes of mesh axes
            result = self.results.call(func, fake_kernel(func) or func, args, kwargs, state)
        except RuntimeError:
            require_one_device(self, func, args, kwargs)
            raise
        if is_own:  # their shape functions do not compare devices
            require_one_device(self, func, args, kwargs)
        if func is aten.detach.default and _torch.is_above_autograd():
            func = aten.alias.default
        if func is aten._to_copy.default and not isinstance(args[0], torch.Tensor):  # a number that vmap makes a tensor
            func, args, kwargs = aten.full.default, ([], args[0]), {"dtype": result.dtype, "device": result.device}
        if _has_tensor(result):
            self.write(func, args, kwargs, result)
        return result

    def _unusual(
        self, func: _torch.Op, args: Args, kwargs: Kwargs, replacement: Callable[..., Any] | None
    ) -> Argument | NotImplementedType:
        """Record an op in another way than most, or refuse it. NotImplemented for an op that is recorded as most."""
        check_op(func)
        if replacement is not None:
            with self.unrolling():  # records the ops that it calls
                result = replacement(*args, **kwargs)
            if result is not NotImplemented:
                self.layouts.leave_unknown(result, (args, kwargs), str(func))
                return result
        if func is aten.as_strided.default:
            return strided(self, *args, **kwargs)
        if func._schema.name.startswith("aten::_foreach_"):
            with self:
                return _torch.one_by_one(func, *args, **kwargs)
        if (self._is_unrolling or torch.is_inference_mode_enabled()) and _torch.is_composite(func):
            with self:
                return _torch.as_composed(func, *args, **kwargs)
        if func is _MADE or self.zeros:
            result = _with_zeros(self, func, args, kwargs)
            if result is not NotImplemented:
                return result
        _refuse_draws(func, args, kwargs)
        if func is aten.lift_fresh.default and not isinstance(args[0], _torch.FakeTensor):
            return self.lift(func, args[0])
        if func._schema.is_mutable:
            return mutate(self, func, args, kwargs)
        result = self._known(func, args, kwargs) if asks_for_values(func) else NotImplemented
        if result is NotImplemented:
            _refuse_decisions(self, func, args)
        return result

    @property
    def is_differentiated(self) -> bool:
        return self.forward_only or (isinstance(self.outer, Recorder) and self.outer.is_differentiated)

    def _known(self, func: _torch.Op, args: Args, kwargs: Kwargs) -> Argument:
        result = fold_constants(self, func, args, kwargs)
        if isinstance(result, torch.Tensor):
            return self.lift(aten.lift_fresh.default, result)
        if _has_tensor(result):
            return tuple(self.lift(aten.lift_fresh.default, part) for part in result)
        return result

    def _gradients_are_off(self, func: _torch.Op, backward: bool) -> bool:
        if backward or torch.is_grad_enabled() or gradients_at_call():  # a primitive disables them
            return False
        functions = _torch.running_functions(trace.__code__)
        foreign = [each for each in functions if each.__module__.split(".")[0] != _PACKAGE]
        if self.forward_only and foreign and not _is_of_a_user(func) and not _may_be_inlined():
            raise CustomFunctionError(
                f"{current_source()}: the autograd.Function {foreign[0].__name__} would lose its backward here, "
                "because derivatives are taken from the traced forward. Write it with differentiable ops (a "
                "straight-through f is x + (f(x) - x).detach(), a gradient times -k is (1 + k) * x.detach() - k * x), "
                "or as an op with a rule: fp.register_rule(op, text, function=…), see docs/rules.md"
            )
        return not functions or gradients_at_call() is False


def _may_be_inlined() -> bool:
    """Whether a function without its backward is right, because the program takes no derivative."""
    if is_unwanted := in_trace_without_gradient():
        assume(no_gradient_is_wanted)
    return is_unwanted


@lru_cache(maxsize=4096)
def _is_usual(func: _torch.Op) -> bool:
    """Whether no case of `Recorder._unusual` is about an op of this name, schema and tags."""
    if func.namespace not in ("aten", "prims", "fp") or func._schema.is_mutable or func._schema.name in _UNUSUAL:
        return False
    is_foreach = func._schema.name.startswith("aten::_foreach_")
    return not (is_foreach or torch.Tag.nondeterministic_seeded in func.tags or asks_for_values(func))


_UNUSUAL = {"aten::as_strided", "aten::lift_fresh", "aten::_efficientzerotensor"}


def _has_tensor(result: Argument) -> bool:
    if isinstance(result, torch.Tensor):
        return True
    return isinstance(result, (tuple, list)) and any(isinstance(part, torch.Tensor) for part in result)


def _is_of_a_user(func: _torch.Op) -> bool:
    form = differentiable_form(func)
    return form is not None and func.namespace != "fp" and form.__module__.split(".")[0] != _PACKAGE


# --- Zero tangents. torch creates them without memory and computes only their shapes; a trace records them as zeros ---

# torch's zero tensors (`_efficientzerotensor`) lose their trace when they are viewed, for example by nested vmaps. They
# then become tensors of the meta device, and so do results computed with them. Two properties are preserved. A product
# with a zero tensor is zero for any other factor, and a sum with a zero tensor is the other summand.
_MADE = aten._efficientzerotensor.default


def _with_zeros(recording: Recorder, func: _torch.Op, args: Args, kwargs: Kwargs) -> Replaced:
    """Record an op on zero tangents. NotImplemented for any other op, and for an op without a shortcut."""
    which = [isinstance(arg, torch.Tensor) and recording.value(arg) in recording.zeros for arg in args[:2]]
    is_zero = func is _MADE or (func in _SCALED and any(which)) or (func in _QUOTIENTS and which[0])
    if is_zero or (func in _SUMS and all(which)):
        like = func(*args, **kwargs)
        shape, options = list(like.shape), {"dtype": like.dtype, "device": like.device}
        made: torch.Tensor = aten.zeros.default(shape, **options)
        recording.zeros.add(recording.write(aten.zeros.default, (shape,), options, made))
        return made
    return _sum(recording, func, args, kwargs, which) if func in _SUMS and any(which) else NotImplemented


def _sum(recording: Recorder, func: _torch.Op, args: Args, kwargs: Kwargs, which: list[bool]) -> torch.Tensor:
    result, factor = func(*args, **kwargs), kwargs.get("alpha", 1) * (-1 if func is aten.sub.Tensor else 1)
    with recording:
        other = args[0] if which[1] else args[1] if factor == 1 else aten.mul.Scalar(args[1], factor)
        total: torch.Tensor = aten._to_copy.default(aten.expand.default(other, list(result.shape)), dtype=result.dtype)
    return total


_SCALED = {*VIEWS, aten.neg.default, aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}
_SUMS = {aten.add.Tensor, aten.sub.Tensor}


# --- Draws from torch's own generators for which `keyed_draws` does not have a keyed draw ---


def _refuse_draws(func: _torch.Op, args: Args, kwargs: Kwargs) -> None:
    """Refuse an op that draws from torch's generators. Attention with a `dropout_p` of 0 is accepted."""
    # Every rank has separate generators, so values that should be replicated would differ.
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return
    given = named_arguments(func, args, kwargs)
    if "dropout_p" in {argument.name for argument in func._schema.arguments} and not given.get("dropout_p"):
        return
    by = " with a generator=" if given.get("generator") is not None else ""
    raise TracingError(
        f"{current_source()}: {func}{by} draws from torch's generator, which differs between ranks. Use a draw that "
        f"becomes a keyed draw ({_KEYED}), or use fp.random.uniform or fp.random.normal with "
        "fp.random.next_key(), or pass the numbers as an argument"
    )


def _refuse_decisions(recording: TraceWriter, func: _torch.Op, args: Args) -> None:
    """Refuse to read into Python a number that is computed only from draws, as layer drop does."""
    node = recording.value(args[0]) if func is aten._local_scalar_dense.default else None
    if node is None:
        return
    seen: dict[fx.Node, None] = {}
    for each in topological_order(node, lambda each: () if draws(each) else operands_of(each), seen):
        seen[each] = None
    if any(map(draws, seen)) and not any(each.op == "placeholder" for each in seen):
        raise TracingError(
            f"{current_source() or 'the function'}: Python branches on a random number, but a program has one branch "
            "for all steps; use torch.where(torch.rand(()) < p, x, layer(x)). Switch off a model's layer drop, in "
            "transformers by config.layerdrop = 0 (or encoder_layerdrop, decoder_layerdrop)"
        )


_KEYED = (
    "rand, randn, randint, randperm, normal, bernoulli, the _like ones, uniform_, normal_, log_normal_, exponential_, "
    "geometric_, cauchy_ and random_ with bounds, of real numbers and without generator="
)
