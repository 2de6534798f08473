"""Keyword arguments: bind known ones to positions, and explain unknown ones.

Layouts identify an argument by its position. Arguments by keyword only are one more at the end, a `Keywords`.
"""

from __future__ import annotations

import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from sharding_specs import register_dataclasses

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")

# By the code to write, the names that other libraries have. `{v}` is the passed value if it is a number, a string or
# None, else "…".
_HINTS = {
    "clip gradients by train_step(clip={v})": "max_grad_norm max_norm grad_clip clip_grad clip_norm clip_grad_norm "
    "gradient_clipping gradient_clip gradient_clip_val grad_clip_norm",
    "give the rate to the optimizer: fp.optim.adamw({v})": "lr learning_rate",
    "give it to the optimizer: fp.optim.adamw(lr, weight_decay={v})": "weight_decay",
    "give them to the optimizer: fp.optim.adamw(lr, betas=(0.9, 0.999))": "betas",
    "give it to the optimizer: fp.optim.sgd(lr, momentum={v})": "momentum",
    "write optimizer=fp.optim.adamw(1e-3)": "optim",
    "give the optimizer a schedule as its rate: fp.optim.adamw(fp.optim.schedules.cosine(1e-3, 1000))": "scheduler "
    "lr_scheduler warmup_steps num_warmup_steps",
    "choose the ZeRO stage in the plan: fp.zero({v}, 'data')": "zero_stage stage",
    "choose the sharding in the plan: fp.zero(3, 'data'), or fp.zero(2, 'data') to keep parameters replicated": "zero "
    "fsdp sharding_strategy zero_optimization",
    "fp.data_parallel(axis, master={v}) keeps the training state on one rank, and ZeRO shards it": "master",
    "parameters are gathered again in the backward by default; fp.zero(3, 'data', keep_gathered=True) keeps them": ""
    "reshard_after_forward",
    "accumulate gradients in the plan: fp.accumulate({v})": "gradient_accumulation_steps accumulation_steps "
    "accumulate_grad_batches",
    "choose the dtype in the plan: fp.mixed_precision({v})": "mixed_precision precision dtype autocast bf16 fp16",
    "choose the dtype in the plan: fp.mixed_precision('bf16')": "mp_policy",
    "choose what is recomputed in the plan: fp.remat()": "gradient_checkpointing activation_checkpointing "
    "checkpoint_activations",
    "make a function of the module: model, params = fp.functional(module)": "model module",
    "give the parameters to train.init(params)": "params parameters",
    "write loss=": "loss_fn",
    "write mesh=Mesh(data=2)": "device_mesh",
    "the mesh goes to fp.train_step or fp.compile": "mesh",
    "write specs=, a dict from path patterns to P(…)": "parallelize_plan",
    "write microbatches={v}": "n_microbatches num_microbatches chunk_count",
    "write bucket= in bytes": "bucket_cap_mb reduce_bucket_size allgather_bucket_size",
    "write in_specs=": "in_shardings in_axes",
    "write out_specs=": "out_shardings out_axes",
    "a training step donates its state: train_step(donate=True)": "donate_argnums",
    "bind static arguments by functools.partial": "static_argnums",
    "give temperature= for draws; 0 takes the best token": "do_sample",
    "give it to the call, max_new_tokens={v}": "max_new_tokens max_length",
    "it is not built here: use model.generate()": "num_beams num_return_sequences logits_processor stopping_criteria "
    "repetition_penalty no_repeat_ngram_size bad_words_ids assistant_model penalty_alpha streamer min_p",
    "leave it out; a compiled program does not need it": "find_unused_parameters static_graph broadcast_buffers "
    "device_ids gradient_as_bucket_view process_group output_device set_to_none fused foreach capturable fullgraph "
    "dynamic jit",
}
ELSEWHERE: Mapping[str, str] = {name: hint for hint, names in _HINTS.items() for name in names.split()}
_OWN_NAMES = {"learning_rate": "lr", "stage": "stage", "loss_fn": "loss", "optim": "optimizer", "device_mesh": "mesh"}


def explain_keywords(f: F) -> F:
    """Return a function or class with errors for unknown or duplicate keyword arguments that show how to fix the call.

    >>> @explain_keywords
    ... def train(loss, *, clip=None): ...
    >>> train(None, max_grad_norm=1.0)
    Traceback (most recent call last):
    TypeError: train has no argument max_grad_norm: clip gradients by train_step(clip=1.0)
    """
    call: Any = getattr(f, "__init__") if isinstance(f, type) else f  # noqa: B009
    signature, name = inspect.signature(call), getattr(f, "__name__", "")
    positional = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    known = [each for each in signature.parameters if each != "self"]

    @functools.wraps(call)
    def explained(*args: Any, **kwargs: Any) -> Any:
        for key, value in kwargs.items():
            if key not in known:
                raise TypeError(f"{name} has no argument {key}: {_hint(key, value, known)}")
        for key, value in zip(positional, args, strict=False):
            if key in kwargs:
                raise TypeError(_doubled(name, key, type(value).__name__, repr(kwargs[key])))
        return call(*args, **kwargs)

    if not isinstance(f, type):
        return explained  # type: ignore[return-value]
    setattr(f, "__init__", explained)  # noqa: B010
    return f


def _hint(name: str, value: Any, own: list[str]) -> str:
    shown = repr(value) if value is None or isinstance(value, (bool, int, float, str)) else "…"
    if _OWN_NAMES.get(name) in own:
        return f"write {_OWN_NAMES[name]}={shown}"
    if name in ELSEWHERE:
        return ELSEWHERE[name].format(v=shown)
    near = get_close_matches(name, own, n=1, cutoff=0.6)
    return f"did you mean {near[0]}=?" if near else f"its arguments are {', '.join(own)}"


def _doubled(function: str, name: str, kind: str, shown: str) -> str:
    taken = "It holds no parameters: train.init(params) takes them"
    own = f". {taken}. Write fp.optim.{function}(lr={shown})" if name == "lr" else ""
    return f"{function} gets {name} twice, by position (a {kind}) and as {name}={shown}{own}"


# --- Binding to positions ---


class Keywords(UserDict[str, Any]):
    """Arguments that a function takes by keyword only, as its last positional argument: a pytree, sorted by name."""


register_dataclasses(Keywords())


def with_keywords(f: Callable[..., R]) -> Callable[..., R]:
    def call(*args: Any) -> R:
        return f(*args[:-1], **args[-1]) if args and isinstance(args[-1], Keywords) else f(*args)

    return call


_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_signature(f: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(f)
    except (TypeError, ValueError):
        return None


def copy_signature(f: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    made.__signature__ = call_signature(f)  # type: ignore[attr-defined]
    return made


def bind_positional(
    signature: inspect.Signature | None, name: str, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return all arguments by position. Omitted arguments before the last passed one get their defaults."""
    if not named:
        return args
    if signature is None:
        raise TypeError(f"{name} does not say what its arguments are called: give {_listed(named)} by place")
    try:
        given = signature.bind(*args, **named).arguments
    except TypeError as error:
        raise TypeError(f"{name}{signature}: {error}") from None
    places = [parameter for parameter in signature.parameters.values() if parameter.kind in _PLACED]
    last = max((index for index, parameter in enumerate(places) if parameter.name in given), default=-1)
    placed = [given.get(parameter.name, parameter.default) for parameter in places[: last + 1]]
    placed += next((given.get(p.name, ()) for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL), ())
    keywords = Keywords({key: value for key, value in named.items() if key not in {each.name for each in places}})
    return (*placed, keywords) if keywords else tuple(placed)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
