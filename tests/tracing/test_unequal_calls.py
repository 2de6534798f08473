"""Marked calls that are not equal to an earlier one, or do more than to return results, are traced."""

from __future__ import annotations

import itertools
import random
from collections import UserDict
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import functional_parallel as fp

from .test_repeated import Loss, Mark, affine, require_same_program


def scaled_by_its_number(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x, number: affine(p, x) * number)
    for number, p in enumerate(params):
        x = layer(p, x, number)
    return x


def scaled_by_a_list(mark: Mark, params: Any, x: Tensor) -> Tensor:
    scales: list[float] = []
    layer = mark(lambda p, x: affine(p, x) * scales[-1])
    for number, p in enumerate(params):
        scales.append(1.5 * number)
        x = layer(p, x)
    return x


def closures_over_numbers(mark: Mark, params: Any, x: Tensor) -> Tensor:
    for number, p in enumerate(params):
        x = mark(lambda p, x, number=number: affine(p, x) * number)(p, x)
    return x


def closures_over_activations(mark: Mark, params: Any, x: Tensor) -> Tensor:
    for p in params:
        y = x + 1
        x = mark(lambda p, x, y=y: affine(p, x) * y)(p, x)
    return x


def over_an_activation_that_changes(mark: Mark, params: Any, x: Tensor) -> Tensor:
    total = x * 0
    layer = mark(lambda p, x: affine(p, x) + total)
    for p in params:
        x = layer(p, x)
        total.add_(x)
    return x


def appended(mark: Mark, params: Any, x: Tensor) -> Tensor:
    """The results that a call adds to a list of its caller."""
    seen: list[Tensor] = []

    @mark
    def layer(p: Any, x: Tensor) -> Tensor:
        seen.append(x)
        return affine(p, x)

    for p in params:
        x = layer(p, x)
    return x + sum(seen)


def appended_to_an_argument(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(p: Any, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return affine(p, x)

    found: list[Tensor] = []
    for p in params:
        seen: list[Tensor] = []
        x = layer(p, x, seen)
        found += seen
    return x + sum(found)


def written_arguments(mark: Mark, params: Any, x: Tensor) -> Tensor:
    @mark
    def layer(p: Any, x: Tensor, total: Tensor) -> Tensor:
        y = affine(p, x)
        total[:, 1:].add_(y[:, 1:])
        return y

    total = torch.zeros_like(x)
    for p in params:
        x = layer(p, x, total)
    return x + total


def closures_over_functions(mark: Mark, params: Any, x: Tensor) -> Tensor:
    for p, act in zip(params, (torch.sin, torch.cos, torch.Tensor.tan, torch.exp, torch.Tensor.exp), strict=True):
        x = mark(lambda p, x, act=act: affine(p, act(x)))(p, x)
    return x


def numbers_from_an_iterator(mark: Mark, params: Any, x: Tensor) -> Tensor:
    numbers = itertools.count()
    layer = mark(lambda p, x: affine(p, x) * next(numbers))
    for p in params:
        x = layer(p, x)
    return x


class Counter:
    number = 0


def counted_in_a_class(mark: Mark, params: Any, x: Tensor) -> Tensor:
    Counter.number = 0

    @mark
    def layer(p: Any, x: Tensor) -> Tensor:
        Counter.number += 1
        return affine(p, x) * Counter.number

    for p in params:
        x = layer(p, x)
    return x


def appended_by_a_method(mark: Mark, params: Any, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    append = seen.append

    @mark
    def layer(p: Any, x: Tensor) -> Tensor:
        append(x)
        return affine(p, x)

    for p in params:
        x = layer(p, x)
    return x + sum(seen)


def over_an_array(mark: Mark, params: Any, x: Tensor) -> Tensor:
    scales = numpy.ones(1)
    layer = mark(lambda p, x: affine(p, x) * float(scales[0]))
    for p in params:
        scales[0] += 1
        x = layer(p, x)
    return x


def pythons_random_numbers(mark: Mark, params: Any, x: Tensor) -> Tensor:
    random.seed(0)
    layer = mark(lambda p, x: affine(p, x) * random.random())
    for p in params:
        x = layer(p, x)
    return x


def strides_of_an_argument(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x: affine(p, x) * x.stride(0))
    for p in params:
        x = layer(p, x)
    return x


def values_of_an_argument(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda p, x, scale: affine(p, x) * scale.item())
    for number, p in enumerate(params):
        x = layer(p, x, torch.tensor(1.0 + number))
    return x


def under_a_derivative(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(affine)
    for p in params:
        x = x + torch.func.grad(lambda x, p=p: layer(p, x).square().sum())(x)
    return x


def shared_and_separate_weights(mark: Mark, params: Any, x: Tensor) -> Tensor:
    """The same tensor twice, or two tensors."""
    layer = mark(lambda p, one, two, x: affine(p, x) @ one @ two)
    for number, p in enumerate(params):
        x = layer(p, p["w"], params[0 if number < 3 else number]["w"], x)
    return x


class Numbered(UserDict[str, Tensor]):
    number = 1.0


def results_with_an_order_and_attributes(mark: Mark, params: Any, x: Tensor) -> Tensor:
    """The leaves of the mapping are sorted by key, and have no attributes of it."""

    @mark
    def layer(p: Any, x: Tensor) -> Numbered:
        found = Numbered(b=affine(p, x), a=x)
        found.number = 2.0
        return found

    for p in params:
        found = layer(p, x)
        x = next(iter(found.values())) * found.number
    return x


def in_other_modes(mark: Mark, params: Any, x: Tensor) -> Tensor:
    layer = mark(affine)
    for number, p in enumerate(params):
        with torch.set_grad_enabled(number != 1), torch.autocast("cpu", torch.bfloat16, enabled=number == 2):
            x = x + layer(p, x)
    return x


DIFFERENT: dict[str, tuple[Loss, int]] = {
    each.__name__: (each, runs)
    for each, runs in (
        *((scaled_by_its_number, 5), (scaled_by_a_list, 5), (closures_over_numbers, 5), (appended, 5)),
        *((closures_over_activations, 5), (over_an_activation_that_changes, 5), (appended_to_an_argument, 5)),
        *((written_arguments, 5), (numbers_from_an_iterator, 5), (pythons_random_numbers, 5)),
        *((closures_over_functions, 5), (counted_in_a_class, 5), (appended_by_a_method, 5), (over_an_array, 5)),
        *((strides_of_an_argument, 5), (values_of_an_argument, 5), (under_a_derivative, 5)),
        *((shared_and_separate_weights, 4), (in_other_modes, 4), (results_with_an_order_and_attributes, 5)),
    )
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_calls_are_traced(name: str) -> None:
    require_same_program(*DIFFERENT[name])


def test_a_marked_function_is_the_function_outside_of_a_trace() -> None:
    seen: list[Tensor] = []
    layer = fp.repeated(lambda x: seen.append(x))
    layer(torch.ones(2)), layer(torch.ones(2))
    assert len(seen) == 2 and fp.repeated(affine).__name__ == "affine"
