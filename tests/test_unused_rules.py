"""A rule that shall split and finds no parameter is warned of, once, where the transform is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, optional

PARAMS = {"layers": torch.ones(2, 4, 4), "head": torch.ones(4, 4)}
X = torch.ones(4, 4)


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = torch.tanh(x @ layer)
    return (x @ params["head"]).sum()


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "tensor_parallel('a')": lambda rules: fp.tensor_parallel("a", rules),
    "zero(3, 'a')": lambda rules: fp.zero(3, "a", rules),
    "zero(1, 'a')": lambda rules: fp.zero(1, "a", rules),
    "pipeline('a', '1f1b', 2)": lambda rules: fp.pipeline("a", rules, microbatches=2),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_it_names_the_rule_the_nearest_and_the_line(name: str) -> None:
    rules = {"layers": P("a"), "heads": P("a")}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lower(TRANSFORMS[name](rules))
    assert {(str(one.message), one.filename, one.lineno) for one in caught} == {
        (
            f"{name}: rule 'heads' finds no parameter, so it splits none; the nearest are head, layers. If the model "
            "need not have it, write sharding_specs.optional('heads')",
            __file__,
            TRANSFORMS[name].__code__.co_firstlineno,
        )
    }


def lower(plan: Any) -> None:
    fp.train_step(loss, fp.optim.sgd(0.1), Mesh(a=2, other=1), plan).lower(PARAMS, X)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("rule", [(optional("heads"), P("a")), ("heads", P()), ("heads", P("other"))], ids=str)
def test_it_is_silent_of_what_need_not_be_there_or_is_of_another_axis(name: str, rule: tuple[str, P]) -> None:
    lower(TRANSFORMS[name]({"layers": P("a"), **dict([rule])}))
