"""Habits of a torch loop that take more than an expression, as functions of a loop."""

from __future__ import annotations

import contextlib
import io
import types
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.optim import lr_scheduler
from torch.optim import optimizer as of_optimizers

from .loops import Loop, batch, loss_of


def read_module(loop: Loop) -> None:
    net = loop.net
    for name in ("buffers", "children", "modules", "parameters"):
        list(getattr(net, name)()), list(getattr(net, f"named_{name}")())
    net.get_buffer("shift"), net.get_parameter("first.weight"), net.get_submodule("first")
    net.state_dict(), net.extra_repr(), repr(net), net.dump_patches, net.call_super_init, net.T_destination
    with contextlib.suppress(RuntimeError):  # it has none
        net.get_extra_state()
    net(batch(0)), net.forward(batch(0))


def backward(loop: Loop) -> None:
    loss_of(loop.net, batch(0)).backward()
    loop.net.first.weight.retain_grad()
    loop.net.first.bias.grad = torch.ones(4, dtype=torch.float64)


def hook_state_dicts(loop: Loop) -> None:
    net, optimizer = loop.net, loop.optimizer
    net.register_state_dict_pre_hook(lambda *_: None)
    net.register_state_dict_post_hook(lambda *_: None)
    net.register_load_state_dict_pre_hook(lambda *_: None)
    net.register_load_state_dict_post_hook(lambda *_: None)
    for kind in ("state_dict", "load_state_dict"):
        for when in ("pre", "post"):
            getattr(optimizer, f"register_{kind}_{when}_hook")(lambda *_: None)
    net.state_dict(), optimizer.state_dict()


def record_forwards(loop: Loop) -> None:
    kept = loop.kept["outputs"] = []
    loop.net.first.register_forward_hook(lambda module, args, out: kept.append(out))


def keep_in_attribute(loop: Loop) -> None:
    forward = loop.net.first.forward

    def keeping(x: torch.Tensor) -> torch.Tensor:
        loop.net.last = forward(x)
        return loop.net.last

    loop.net.last = None
    loop.net.first.forward = keeping


def hook_forwards(loop: Loop) -> None:
    loop.net.first.register_forward_hook(lambda module, args, out: 2 * out)
    loop.net.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def hook_all_forwards(loop: Loop) -> None:
    handle = of_modules.register_module_forward_hook(
        lambda module, args, out: 2 * out if module is loop.net.act else None
    )
    loop.kept["handle"] = handle


def mode(loop: Loop) -> None:
    loop.net.train(), loop.net.eval()
    loop.net.training = False


def replace_submodule(loop: Loop) -> None:
    loop.net.add_module("act", nn.Sigmoid())
    loop.net.register_module("more", nn.Tanh())
    loop.net.set_submodule("act", nn.ReLU())


def buffers(loop: Loop) -> None:
    loop.net.register_buffer("shift", torch.ones(4, dtype=torch.float64))
    loop.net.shift.mul_(2)
    loop.net.shift.data += 1
    loop.net.gain.data = torch.full((4,), 3.0, dtype=torch.float64)


def replace_forward(loop: Loop) -> None:
    forward = type(loop.net).forward
    loop.net.forward = types.MethodType(lambda net, x: 2 * forward(net, x), loop.net)


def load_state_dict(loop: Loop) -> None:
    net = loop.current()
    net.load_state_dict({name: 2 * each for name, each in net.state_dict().items()})
    net.apply(lambda each: nn.init.ones_(each.bias) if isinstance(each, nn.Linear) else None)


def write_parameters(loop: Loop) -> None:
    first, second = loop.current().first, loop.net.second
    with torch.no_grad():
        first.weight.mul_(0.5)
        first.weight[0] = 1.0
    first.bias.data.add_(1)  # torch does not count it as a write
    second.weight.data = second.weight.data.t().contiguous()
    second.bias.detach().numpy()[0] = 3.0


def write_storages(loop: Loop) -> None:
    net = loop.current()
    net.first.bias.untyped_storage().fill_(0)
    torch.no_grad()(net.second.bias.set_)(torch.ones(4, dtype=torch.float64))
    torch.utils.swap_tensors(net.second.weight, nn.Parameter(torch.eye(4, dtype=torch.float64)))
    net.first.weight.data.real.fill_(0.25)


def own_scheduler(loop: Loop) -> None:
    own = loop.kept.setdefault("scheduler", lr_scheduler.ExponentialLR(loop.optimizer, 0.5))
    own.step()


def load_rates(loop: Loop) -> None:
    saved = loop.optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.01
    loop.optimizer.load_state_dict(saved)


def load_optimizer(loop: Loop) -> None:
    other = torch.optim.SGD(loop.net.parameters(), 0.1, momentum=0.9)
    (100 * loss_of(loop.net, batch(9))).backward()
    other.step()
    loop.optimizer.load_state_dict(other.state_dict())


def add_group(loop: Loop) -> None:
    loop.net.extra = nn.Parameter(torch.ones(4, dtype=torch.float64))
    loop.optimizer.add_param_group({"params": [loop.net.extra], "lr": 1.0})


def optimizer_step(loop: Loop) -> None:
    loss_of(loop.net, batch(9)).backward()
    loop.optimizer.step()


def hook_steps(loop: Loop) -> None:
    loop.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.0))
    loop.optimizer.register_step_post_hook(lambda *_: None)


def hook_all_steps(loop: Loop) -> None:
    def pre(optimizer: Any, *_: Any) -> None:
        if optimizer is loop.optimizer:
            optimizer.param_groups[0].update(lr=0.0)

    loop.kept["handle"] = of_optimizers.register_optimizer_step_pre_hook(pre)


def read_scheduler(loop: Loop) -> None:
    loop.scheduler.state_dict(), loop.scheduler.get_last_lr(), loop.scheduler.optimizer
    loop.optimizer.state_dict(), loop.optimizer.defaults, loop.optimizer.profile_hook_step


def load_scheduler(loop: Loop) -> None:
    loop.scheduler.load_state_dict({**loop.scheduler.state_dict(), "last_epoch": 5})


def save_all(loop: Loop) -> None:
    torch.save({"net": loop.net.state_dict(), "optimizer": loop.optimizer.state_dict()}, io.BytesIO())
    for each in loop.net.parameters():
        each.detach().numpy(), each.data_ptr(), each.tolist(), each.untyped_storage().data_ptr()
