"""Optimizers and schedulers of a configuration, with DeepSpeed's defaults for each type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from sharding_specs import optional
from sharding_specs.rules import nearest

from ... import optim
from ...optim import Optimizer, Schedule, schedules
from .schema import KEYS

_REQUIRED = "required"


class _Kind(NamedTuple):
    make: Callable[..., Any]  # takes the learning rate first
    defaults: dict[str, Any]  # of all parameters of the type
    names: Mapping[str, str] = {}  # our names of parameters with other names


def _adam(rate: Schedule, *, adam_w_mode: bool = True, bias_correction: bool, **options: Any) -> Optimizer:
    if not bias_correction:
        raise ValueError("optimizer.params.bias_correction: false is refused for Adam")
    return (optim.adamw if adam_w_mode else optim.adam)(rate, **options)


def _lamb(rate: Schedule, *, max_coeff: float, min_coeff: float, **options: Any) -> Optimizer:
    return optim.lamb(rate, trust=(min_coeff, max_coeff), **options)


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
_ADAGRAD = {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
_MUON = {"lr": None, "muon_lr": None, "momentum": 0.95, "weight_decay": 0.0}
OPTIMIZERS: dict[str, _Kind] = {
    "Adam": _Kind(_adam, _ADAM | {"adam_w_mode": True}),
    "AdamW": _Kind(_adam, _ADAM),
    "Adagrad": _Kind(optim.adagrad, _ADAGRAD),
    "Lamb": _Kind(_lamb, _ADAM | {"max_coeff": 10.0, "min_coeff": 0.01}),
    "Lion": _Kind(optim.lion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}),
    "Muon": _Kind(optim.muon, _MUON | {"adam_lr": None, "betas": (0.9, 0.95), "eps": 1e-10}),
    "SGD": _Kind(optim.sgd, {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}),
}


def _without_rate(schedule: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda rate, /, **own: schedule(**own, **options)


_WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "log"}
_COSINE = {"warmup_min_ratio": 0.0, "warmup_num_steps": 1000, "cos_min_ratio": 1e-4, "warmup_type": "log"}
_TOTAL = {"total_num_steps": _REQUIRED}
_CYCLE: dict[str, Any] = {"cycle_min_lr": _REQUIRED, "cycle_max_lr": _REQUIRED, "cycle_momentum": _REQUIRED}
_CYCLE |= {"cycle_first_step_size": 2000, "cycle_second_step_size": None, "decay_lr_rate": 0.0, "decay_step_size": 0}
_WARMUP_NAMES = {"warmup_min_lr": "low", "warmup_max_lr": "high", "warmup_min_ratio": "low", "cos_min_ratio": "end"}
_WARMUP_NAMES |= {"warmup_num_steps": "steps", "warmup_type": "shape", "total_num_steps": "total"}
_CYCLE_NAMES = {"cycle_min_lr": "low", "cycle_max_lr": "high", "decay_lr_rate": "decay"}
_CYCLE_NAMES |= {"cycle_first_step_size": "first", "cycle_second_step_size": "second", "decay_step_size": "decay_every"}
_TEST = {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000}
_TEST |= {"lr_range_test_step_rate": 1.0, "lr_range_test_staircase": False}
_TEST_NAMES = dict(zip(_TEST, ("low", "size", "rate", "stairs"), strict=True))
SCHEDULERS: dict[str, _Kind] = {
    "WarmupLR": _Kind(_without_rate(schedules.warmup_lr, compat=True), _WARMUP, _WARMUP_NAMES),
    "WarmupDecayLR": _Kind(_without_rate(schedules.warmup_decay_lr, compat=True), _WARMUP | _TOTAL, _WARMUP_NAMES),
    "WarmupCosineLR": _Kind(partial(schedules.warmup_cosine_lr, compat=True), _COSINE | _TOTAL, _WARMUP_NAMES),
    "OneCycle": _Kind(_without_rate(schedules.one_cycle), _CYCLE, _CYCLE_NAMES),
    "LRRangeTest": _Kind(_without_rate(schedules.range_test), _TEST, _TEST_NAMES),
}


def _parameters(kinds: Mapping[str, _Kind], block: str, given: Mapping[str, Any]) -> tuple[_Kind, dict[str, Any]]:
    name, prefix = given[f"{block}.type"], f"{block}.params."
    kind = {each.lower(): kind for each, kind in kinds.items()}.get(name.lower())
    if kind is None:
        is_one_bit = name.lower() in ("onebitadam", "zerooneadam", "onebitlamb")
        one_bit = "1-bit communication is refused; " if is_one_bit else ""
        raise ValueError(
            f"{block}.type: {name!r}: {one_bit}the types are {', '.join(kinds)}; the nearest is "
            f"{nearest(name, kinds, most=1)[0]}"
        )
    found = {path.removeprefix(prefix): value for path, value in given.items() if path.startswith(prefix)}
    own = {parameter: found.get(parameter, default) for parameter, default in kind.defaults.items()}
    foreign = [each for each in found if each not in own and KEYS[prefix + each].treatment == "honoured"]
    if foreign:
        raise ValueError(f"{prefix}{foreign[0]}: {name} does not have it; its parameters are {', '.join(own)}")
    missing = [prefix + parameter for parameter, value in own.items() if value is _REQUIRED]
    if missing:
        raise ValueError(f"{', '.join(missing)}: required by {name}")
    return kind, own


def build_schedule(given: Mapping[str, Any]) -> Callable[[float], Schedule]:
    if "scheduler.type" not in given:
        return lambda rate: rate
    kind, own = _parameters(SCHEDULERS, "scheduler", given)
    own.pop("cycle_momentum", None)
    return lambda rate: kind.make(rate, **{kind.names[name]: value for name, value in own.items()})


def build_optimizer(
    given: Mapping[str, Any], scheduled: Callable[[float], Schedule], beside_muon: tuple[str, ...]
) -> Optimizer:
    """Return the optimizer that the file names. With Muon, AdamW updates what the patterns `beside_muon` match."""
    kind, own = _parameters(OPTIMIZERS, "optimizer", given)
    rate = own.pop("lr")
    if kind.make is not optim.muon:
        return kind.make(scheduled(rate), **own)  # type: ignore[no-any-return]
    rates = {"muon_lr": 0.02, "adam_lr": 3e-4} if rate is None else {"muon_lr": rate, "adam_lr": rate}
    rates |= {name: own[name] for name in rates if own[name] is not None}
    decay = own["weight_decay"]
    matrices = optim.muon(scheduled(rates["muon_lr"]), momentum=own["momentum"], weight_decay=decay)
    others = optim.adamw(scheduled(rates["adam_lr"]), betas=own["betas"], eps=own["eps"], weight_decay=decay)
    return optim.by_path({optional(pattern): others for pattern in beside_muon} | {"*": matrices})
