"""Values of "auto", as Accelerate and transformers fill them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .checks import Problems


class _Fill(NamedTuple):
    arguments: str  # names of the arguments that it needs, separated by spaces
    value: Callable[..., Any] = lambda value: value  # from these
    must_match: bool = True  # whether another value in the file is an error


_ZERO, _OPTIMIZER, _SCHEDULER = "zero_optimization", "optimizer.params", "scheduler.params"
_RULES: dict[str, _Fill] = {
    "train_micro_batch_size_per_gpu": _Fill("per_device_train_batch_size"),
    "gradient_accumulation_steps": _Fill("gradient_accumulation_steps"),
    "gradient_clipping": _Fill("max_grad_norm"),
    "fp16.enabled": _Fill("fp16"),
    "bf16.enabled": _Fill("bf16"),
    f"{_OPTIMIZER}.lr": _Fill("learning_rate"),
    f"{_OPTIMIZER}.betas": _Fill("adam_beta1 adam_beta2", lambda *betas: list(betas)),
    f"{_OPTIMIZER}.eps": _Fill("adam_epsilon"),
    f"{_OPTIMIZER}.weight_decay": _Fill("weight_decay"),
    f"{_SCHEDULER}.warmup_min_lr": _Fill("", lambda: 0.0, must_match=False),
    f"{_SCHEDULER}.warmup_max_lr": _Fill("learning_rate"),
    f"{_SCHEDULER}.warmup_num_steps": _Fill("warmup_steps"),
    f"{_SCHEDULER}.total_num_steps": _Fill("max_steps"),
    f"{_ZERO}.reduce_bucket_size": _Fill("hidden_size", lambda h: h * h, must_match=False),
    f"{_ZERO}.stage3_prefetch_bucket_size": _Fill("hidden_size", lambda h: int(0.9 * h * h), must_match=False),
    f"{_ZERO}.stage3_param_persistence_threshold": _Fill("hidden_size", lambda h: 10 * h, must_match=False),
}
ARGUMENTS = sorted({name for rule in _RULES.values() for name in rule.arguments.split()})


def filled(given: Mapping[str, Any], arguments: Any, named: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    known = _known(arguments, named)
    own_rate = given.get(f"{_OPTIMIZER}.lr", "auto")  # the warm-up of a file ends at the rate of the file
    beside = {} if own_rate == "auto" else {"learning_rate": own_rate}
    found = dict(given)
    for path, value in given.items():
        rule, values = _RULES.get(path), beside | known if value == "auto" else known
        names = rule.arguments.split() if rule else []
        missing = [name for name in names if name not in values]
        wanted = rule.value(*(values[name] for name in names)) if rule and not missing else None
        if value != "auto" or path == "pipeline.stages":
            if rule and rule.must_match and not missing and value != wanted:
                reason = f"{value!r} mismatches {', '.join(names)}, which gives {wanted!r}"
                problems.add(path, f'{reason}; write "auto" in the file')
        elif path == "train_batch_size" or (path == "gradient_clipping" and missing):
            found[path] = 1.0 if path == "gradient_clipping" else None  # None: computed from the other two
        elif not rule or missing:
            advice = f"; give {', '.join(f'{name}=…' for name in missing)}" if missing else "; write a value"
            problems.add(path, f'nothing fills "auto"{advice}')
            del found[path]
        else:
            found[path] = wanted
    return found


def _known(arguments: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    for name in named:
        if name not in ARGUMENTS:
            raise TypeError(f'from_config({name}=…): the arguments that fill "auto" are {", ".join(ARGUMENTS)}')
    known = {name: getattr(arguments, name, None) for name in ARGUMENTS}
    if known["max_steps"] is not None and known["max_steps"] <= 0:  # -1 in TrainingArguments: not known
        known["max_steps"] = None
    known |= named
    if hasattr(arguments, "get_warmup_steps") and known["max_steps"] and "warmup_steps" not in named:
        known["warmup_steps"] = arguments.get_warmup_steps(known["max_steps"])
    return {name: value for name, value in known.items() if value is not None}
