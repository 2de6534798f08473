"""Programs of a module follow its Python state, and side effects of its forward are reported."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import functional_parallel as fp
from functional_parallel.functions import Snapshot
from sharding_specs import Mesh

WARNING = fp.errors.SideEffectWarning


class Config:
    def __init__(self) -> None:
        self.factor, self.powers = 2.0, {"one": [1.0]}


class Net(nn.Module):
    classes: float = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.config, self.terms = nn.Linear(3, 3).double(), Config(), [1.0]
        self.pair, self.stored = (1.0, 2.0), torch.ones(3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = (self.config.factor, self.config.powers["one"][0], self.terms[0], self.pair[0], self.classes)
        for factor in factors:
            x = x * factor
        return self.linear(x) * self.stored


def of(net: nn.Module) -> tuple[Callable[..., torch.Tensor], Any]:
    fn, params = fp.functional(net)
    compiled = fp.compile(fp.data_parallel("data")(lambda params, x: fn(params, x).square().mean()), Mesh(data=2))
    return compiled, lambda x: compiled(params, x)


def programs(compiled: Any) -> int:
    return sum(len(each) for each in compiled._programs._lowered[None]._found.values())


class Other(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


class Doubled(nn.Linear):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(3, 3)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "attribute of an object": lambda net: setattr(net.config, "factor", 3.0),
    "entry inside": lambda net: net.config.powers["one"].__setitem__(0, 3.0),
    "dict": lambda net: net.config.powers.update(one=[5.0]),
    "list": lambda net: net.terms.__setitem__(0, 3.0),
    "tuple": lambda net: setattr(net, "pair", (3.0, 2.0)),
    "new attribute": lambda net: setattr(net, "classes", 4.0),
    "tensor": lambda net: setattr(net, "stored", 2 * net.stored),
    "values of a tensor": lambda net: net.stored.mul_(2),
    "class": lambda net: setattr(net, "__class__", Other),
    "forward": lambda net: setattr(net, "forward", lambda x: 3 * Net.forward(net, x)),
    "hook": lambda net: net.linear.register_forward_hook(lambda module, args, out: 2 * out),
    "pre-hook": lambda net: net.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "submodule": lambda net: net.set_submodule("linear", Doubled(net.linear)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_program_follows(change: str) -> None:
    net = Net()
    _, call = of(net)
    x = torch.randn(4, 3, dtype=torch.float64)
    before = call(x)
    CHANGES[change](net)
    want = net(x).square().mean()
    assert not torch.allclose(before, want)
    torch.testing.assert_close(call(x), want.detach())


def test_an_attribute_of_a_class_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    _, call = of(net)
    x = torch.ones(4, 3, dtype=torch.float64)
    before = call(x)
    monkeypatch.setattr(Net, "classes", 2.0)
    want = net(x).square().mean().detach()
    assert not torch.allclose(before, want) and torch.allclose(call(x), want)


def test_equal_values_and_other_modules_need_no_trace() -> None:
    net = Net()
    snapshot = Snapshot([("", vars(net))])
    net.pair, net.config.factor = (1.0, float("2")), float("2.0")
    assert snapshot.holds() and snapshot.holds()
    net.terms.append(2.0)
    assert not snapshot.holds() and str(snapshot) == "terms[1] was absent and is 2.0"
    net.terms.pop()
    assert snapshot.holds()


class Writing(Net):
    def __init__(self, write: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.write, self.calls, self.memo, self.history = write, 0, None, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.write(self, out)
        return out


def warned(net: nn.Module, calls: int = 3) -> list[str]:
    compiled, call = of(net)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            call(torch.ones(4, 3, dtype=torch.float64))
    assert programs(compiled) == 1, "a change by the forward causes no trace"
    return [str(each.message) for each in caught if each.category is WARNING]


def test_side_effects_of_a_forward_are_reported_once() -> None:
    (text,) = warned(Writing(lambda net, out: setattr(net, "calls", net.calls + 1)))
    assert "Writing: a side effect happened while" in text and "calls was 0 and is 1, by a forward" in text
    (text,) = warned(Writing(lambda net, out: setattr(net, "memo", out)))
    assert "memo was None and is a tensor of shape (4, 3), by a forward" in text
    (text,) = warned(Writing(lambda net, out: net.history.append(out)))
    assert "history[0] was absent and is a tensor" in text
    assert not warned(Writing(lambda net, out: setattr(net, "memo", len(out)))), "computed once"


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_hooks_are_reported_if_they_have_no_effect_on_values() -> None:
    net, calls = Net(), []
    net.linear.register_forward_hook(lambda module, args, out: calls.append(1))
    hooks = dict(net.linear._forward_hooks)
    (text,) = warned(net)
    assert "the forward hook `<lambda>` (test_dependencies.py:" in text and ") of linear returns nothing" in text
    assert calls == [1] and net.linear._forward_hooks == hooks
    for quiet in (lambda module, args, out: out.mul_(2), lambda module, args, out: 2 * out):
        net = Net()
        net.linear.register_forward_hook(quiet)
        assert not warned(net)
    assert not warned(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3).double()))
    assert not warned(nn.utils.weight_norm(nn.Linear(3, 3).double()))


def test_hooks_are_restored_after_an_error() -> None:
    net = Net()
    net.linear.register_forward_hook(lambda module, args, out: out.no_such)
    hooks = dict(net.linear._forward_hooks)
    with pytest.raises(AttributeError):
        of(net)[1](torch.ones(4, 3, dtype=torch.float64))
    assert net.linear._forward_hooks == hooks


def test_a_forward_that_writes_into_a_parameter_is_refused() -> None:
    def clamp(net: Any, out: torch.Tensor) -> None:
        with torch.no_grad():
            net.linear.weight.clamp_(-1, 1)

    with pytest.raises(fp.errors.MutationError, match=r"Writing: the forward writes into the parameter linear\.weight"):
        warned(Writing(clamp))


LOST: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "register_hook": lambda net, out: out.register_hook(lambda grad: 2 * grad),
    "register_post_accumulate_grad_hook": lambda net, out: net.linear.weight.register_post_accumulate_grad_hook(print),
    "retain_grad": lambda net, out: out.retain_grad(),
    "detach_": lambda net, out: out.detach_(),
    r"requires_grad_\(False\)": lambda net, out: net.linear.weight.requires_grad_(False),
    "requires_grad = False": lambda net, out: setattr(net.linear.weight, "requires_grad", False),
    "grad = …": lambda net, out: setattr(net.linear.weight, "grad", torch.ones(3, 3)),
    "data = …": lambda net, out: setattr(out, "data", 2 * out.data),
}


@pytest.mark.parametrize("lost", LOST)
def test_changes_of_autograds_state_are_refused(lost: str) -> None:
    with pytest.raises(fp.errors.SideEffectError, match=rf"test_dependencies.py:\d+: {lost} of a tensor of shape"):
        warned(Writing(LOST[lost]))


def test_autograd_inside_a_forward_has_its_state() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        z = y.square()
        z.register_hook(lambda grad: 3 * grad)
        return torch.autograd.grad(z.sum(), y)[0]

    x = torch.ones(4, dtype=torch.float64)
    found = fp.compile(fp.data_parallel("data")(lambda params, x: (params * forward(x)).mean()), Mesh(data=2))(x[0], x)
    torch.testing.assert_close(found, forward(x).mean().detach())


def test_many_traces_of_one_signature_warn() -> None:
    net = Net()
    _, call = of(net)
    with pytest.warns(RuntimeWarning, match=r"retraced .* terms\[0\] was 7.0 and is 8.0. Each trace takes as long"):
        for number in range(9):
            net.terms[0] = float(number)
            call(torch.ones(4, 3, dtype=torch.float64))


def test_a_module_at_several_places_is_left_as_it_was() -> None:
    """torch.func.functional_call left the tensors of the call in it: fake ones, after a trace."""
    shared = nn.Linear(3, 3)
    module = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(3, 3))
    module[3].weight = shared.weight
    kept = {name: each for name, each in module.named_parameters()}
    fn, params = fp.functional(module)
    assert sorted(params) == ["0.bias", "0.weight", "3.bias"]
    x = torch.randn(4, 3)
    step = fp.compile(fp.grad_and_value(fp.zero(3, "data")(lambda p, x: fn(p, x).square().mean())), Mesh(data=2))
    gradients, value = step(params, x)
    assert all(each is kept[name] for name, each in module.named_parameters())
    torch.testing.assert_close(value, module(x).square().mean())
    wanted = torch.autograd.grad(module(x).square().mean(), [kept[name] for name in gradients])
    for mine, other in zip(gradients.values(), wanted, strict=True):
        torch.testing.assert_close(mine, other)
