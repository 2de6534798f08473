"""Rematerialization: the backward recomputes forward values, so that they are not saved."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, ParamSpec, TypeVar

from ..functions import LocalFunction, explain_keywords
from ..ir import recompute_region
from ..passes import Remat, RematToBudget
from ..program import Hardware, hardware_of
from ..quantities import is_positive_int, parse_bytes
from ..requests import Order, RunPass
from .transform import Transform

_POLICIES = ("layers", "attention", "nothing", "auto")

P = ParamSpec("P")
R = TypeVar("R")


@explain_keywords
@dataclass(frozen=True)
class remat(Transform):
    """Save fewer forward values for the backward and recompute the others (arXiv 1604.06174).

    | policy | saved | recomputed |
    |---|---|---|
    | "layers", the default | values passed from layer to layer | the inside of each layer |
    | "layers", every=k | outputs of every k-th layer | the inside of each group of k layers |
    | "attention" | all except attention scores and probabilities (arXiv 2205.05198 §5) | scores and probabilities |
    | "nothing" | nothing | the entire forward |
    | "auto", the default with a budget | the values that fit | as little work as makes the peak fit |

    Layers are identified by the paths of their parameters: `layers/0/…`, `layers/1/…`. Collectives in a recomputed
    region run a second time. Random draws are keyed, so a recomputed draw gives the same values. The semantics are
    as in `jax.checkpoint`, but the model's code does not change. To mark a function in a model, use `fp.recompute`.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> def loss(params, x):
    ...     for layer in params["layers"]:
    ...         x = torch.tanh(torch.tanh(x @ layer["a"]) @ layer["b"])
    ...     return x.sum()
    >>> params = {"layers": [{"a": torch.ones(2, 8), "b": torch.ones(8, 2)}] * 3}
    >>> def program(plan):
    ...     return fp.compile(fp.grad_and_value(plan(loss)), Mesh()).lower(params, torch.ones(64, 2))
    >>> def products(plan):
    ...     return str(program(plan)).count("mm(")
    >>> products(fp.remat()) - products(fp.remat(where="none"))   # each layer's first one, and the last one's second
    4

    A budget limits the bytes on a rank as counted by `program.memory()`; in a pipeline, on each of its ranks. Each
    residual is then saved or recomputed. If `fp.offload(activations=…)` or `fp.partition_activations` is in the plan,
    it may also be moved or split. The choice takes the least time: by enumeration in a small program, else residuals
    with most bytes per time at the peak come first. `program.notes` has the choice, its time, and a lower bound.

    >>> [program(plan).memory().peak for plan in (fp.remat(where="none"), fp.remat(budget="10 KiB"), fp.remat())]
    [12228, 10180, 8132]
    >>> print(program(fp.remat(budget="10 KiB", hardware="h100")).notes[0])
    remat(budget=10240): at most 9.9 KiB are alive, 11.9 KiB without
      computed again: 1 value of 2.0 KiB in 1 layer, 4.0 µs
      4.0 µs in all, and no choice takes less

    Args:
        policy: a name from the table, or a function that takes a node of the program (`torch.fx.Node`) and returns
            whether its value is saved. Values that are cheap to compute from saved values are still recomputed, unless
            the program is lowered with `without=("cheap ops again",)`.
        every: with "layers", the number of layers per group. The square root of the number of layers needs about the
            least memory.
        where: with "layers" or "auto", a pattern for the paths of the layers that the policy applies to.
        budget: with "auto", the maximum bytes on a rank: 8 << 30, "8GiB" or "8GB". A plan that needs less without
            recomputation does not change.
        hardware: with a budget, the machine that gives the choices' times: an `fp.Hardware`, or a name such as "h100".
            By default, flops and bytes have fixed rates.

    Raises:
        ValueError: if the policy is unknown, `every` is not a positive integer or does not apply to the policy, or
            `budget` is missing for "auto" or for `hardware`, or given for another policy. When the function is
            compiled, if an `fp.offload` beside the budget has a fraction of the activations.
        BudgetError: when the function is compiled, if no choice fits the budget. The message states the lowest peak
            reached, and by which choice.
    """

    policy: str | Callable[..., bool] | None = None
    _: KW_ONLY
    every: int = 1
    where: str = "*"
    budget: int | str | None = None
    hardware: Hardware | str | None = None
    order: ClassVar[Order] = Order.PRECISION

    def __post_init__(self) -> None:
        policy, budget, chosen = self.policy, self.budget, self.chosen
        if not callable(chosen) and chosen not in _POLICIES:
            raise ValueError(f"remat({policy!r}): the policies are {', '.join(map(repr, _POLICIES))}, or a function")
        if not is_positive_int(self.every):
            raise ValueError(f"remat(every={self.every!r}): runs have at least one layer")
        if self.every > 1 and chosen != "layers":
            raise ValueError(f"remat(every={self.every}) is for the policy 'layers', not {chosen!r}")
        if (chosen == "auto") != (budget is not None):
            needs = "'auto' needs a budget: fp.remat(budget='8GiB')"
            wrong = needs if budget is None else f"a budget is for 'auto', not {chosen!r}"
            raise ValueError(f"remat({policy!r}, budget={budget!r}): {wrong}")
        if budget is not None:
            parse_bytes(budget)  # raises for another text
        if self.hardware is not None:
            hardware_of(self.hardware)  # raises for an unknown name
            if budget is None:
                raise ValueError(f"remat({policy!r}, hardware=…): its times weigh choices, so it needs a budget too")

    @property
    def chosen(self) -> str | Callable[..., bool]:
        return self.policy if self.policy is not None else "layers" if self.budget is None else "auto"

    @property
    def name(self) -> str:
        if self.budget is not None:
            machine = "" if self.hardware is None else f", hardware={hardware_of(self.hardware).name!r}"
            return f"remat(budget={self.budget!r}{machine})"
        every = f", every={self.every}" if self.every > 1 else ""
        return f"remat({getattr(self.chosen, '__name__', repr(self.chosen))}{every})"

    def apply(self, f: LocalFunction) -> LocalFunction:
        if self.budget is None:
            return f.requesting(RunPass(Remat(self.chosen, self.every, self.where)))
        hardware = None if self.hardware is None else hardware_of(self.hardware)
        return f.requesting(RunPass(RematToBudget(parse_bytes(self.budget), self.where, hardware)))


def recompute(f: Callable[P, R]) -> Callable[P, R]:
    """Mark a function in a model so that the backward recomputes its inner values.

    >>> import torch, functional_parallel as fp
    >>> @fp.recompute
    ... def block(w, x):
    ...     return torch.tanh(torch.tanh(x @ w) @ w)

    Args:
        f: any function. Outside `fp.compile` and `fp.train_step` the mark has no effect.
    """

    @functools.wraps(f)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        with recompute_region(getattr(f, "__qualname__", "recompute")):
            return f(*args, **kwargs)

    return marked
