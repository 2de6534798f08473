"""Habits of a torch loop with `fp.prepare`: names that change state, their effect, and a function that uses them."""

from __future__ import annotations

import contextlib
import io
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.optim import lr_scheduler
from torch.optim import optimizer as of_optimizers

from .loops import Loop, batch, loss_of

__all__ = ["AS_IN_TORCH", "NO_EFFECT", "READS", "REFUSED", "ROWS", "Habit"]

NO_EFFECT, AS_IN_TORCH, REFUSED = "no effect", "as in torch", "refused"


class Habit(NamedTuple):
    """Row of the table.

    Attributes:
        names: names of torch by class, separated by spaces; `*` matches any text. Words in parentheses describe others.
        verdict: NO_EFFECT on a later step, honoured AS_IN_TORCH, or REFUSED by an error.
        do: performs the habit on a loop, between two steps.
        note: text of the last column.
        match: words of the error, or of a warning, that names the object.
        before: whether `do` runs before `fp.prepare`.
        loop: arguments of the loop.
        recorded: whether the habit changes no parameter in torch, but a record of the script.
    """

    names: dict[str, str]
    verdict: str
    do: Callable[[Loop], Any]
    note: str = ""
    match: str = ""
    before: bool = False
    loop: Mapping[str, Any] = MappingProxyType({})
    recorded: bool = False


# -----------------------------------------------------------------------------
# Habits that take more than an expression
# -----------------------------------------------------------------------------


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


ZEROS = lambda grad: 0 * grad  # noqa: E731
RATE = {"schedule": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)}
PRE_AND_POST = "register_step_pre_hook register_step_post_hook"
STEP_MODULE = "The values must be written after `step.module()`, which brings the current parameters into the module."

ROWS = [
    Habit(
        {
            "Module": "buffers children modules parameters named_* get_* state_dict extra_repr dump_patches "
            "call_super_init T_destination forward",
            "Tensor": "(all others)",
        },
        NO_EFFECT,
        read_module,
        "The module has the values of `fp.prepare`, or of the last `step.module()`.",
    ),
    Habit(
        {
            "Module": "zero_grad",
            "Optimizer": "zero_grad",
            "Tensor": "backward grad grad_dtype retain_grad retains_grad",
        },
        NO_EFFECT,
        lambda loop: (backward(loop), loop.net.zero_grad(), loop.optimizer.zero_grad(), backward(loop)),
        "A step begins without gradients, as a loop that calls `zero_grad` first. It leaves none in `.grad`.",
    ),
    Habit(
        {
            "Module": "register_state_dict_* register_load_state_dict_*",
            "Optimizer": "register_state_dict_* register_load_state_dict_*",
        },
        NO_EFFECT,
        hook_state_dicts,
        "torch calls them in `state_dict` and `load_state_dict`.",
    ),
    Habit(
        {"Optimizer": "state_dict defaults profile_hook_step", "LRScheduler": "state_dict get_* optimizer"},
        NO_EFFECT,
        read_scheduler,
        "`step.metrics.lr` has the rates of a step.",
        loop=RATE,
    ),
    Habit(
        {
            "Module": "share_memory cpu",
            "Tensor": "share_memory_ is_shared numpy data_ptr const_data_ptr tolist storage record_stream",
        },
        NO_EFFECT,
        lambda loop: (save_all(loop), loop.net.cpu(), loop.net.share_memory()),
        "Reads of the memory, also where torch treats them as a write.",
    ),
    Habit(
        {"Module": "compile"},
        NO_EFFECT,
        lambda loop: loop.net.compile(backend="eager"),
        'A step is compiled in any case: `fp.prepare(…, backend="inductor")`.',
    ),
    Habit(
        {"Module": "register_forward_hook"},
        NO_EFFECT,
        record_forwards,
        "A hook that returns nothing runs once, while the step is traced. `SideEffectWarning` names it. Return the "
        "values from the loss, with `has_aux=True`.",
        "hook_forwards|forward hook `<lambda>` \\(of_torch.py:\\d+\\) of first",
        recorded=True,
    ),
    Habit(
        {"Module": "(an attribute that forward sets)"},
        NO_EFFECT,
        keep_in_attribute,
        "It is set once, while the step is traced. `SideEffectWarning` names it.",
        "last was None and is a tensor of shape",
        recorded=True,
    ),
    Habit(
        {"Module": "register_forward_hook register_forward_pre_hook"},
        AS_IN_TORCH,
        hook_forwards,
        "The step is traced again if a hook is added or removed.",
    ),
    Habit(
        {"torch.nn.modules.module": "register_module_forward_hook register_module_forward_pre_hook"},
        AS_IN_TORCH,
        hook_all_forwards,
    ),
    Habit(
        {"Module": "train eval training"},
        AS_IN_TORCH,
        mode,
        "There is a program for each mode. `step.eval` evaluates in the mode `eval`.",
    ),
    Habit(
        {"Module": "(a plain attribute)"},
        AS_IN_TORCH,
        lambda loop: (setattr(loop.net, "scale", 2.0), loop.net.factors.__setitem__(0, 0.5)),
        "The step is traced again. Pass values that change often as arguments of the loss.",
    ),
    Habit(
        {"Module": "add_module register_module set_submodule"},
        AS_IN_TORCH,
        replace_submodule,
        "Of a submodule without trained parameters.",
    ),
    Habit(
        {"Module": "register_buffer", "Tensor": "real imag"},
        AS_IN_TORCH,
        buffers,
        "Buffers, and parameters that are not trained, may be written or replaced at any time.",
    ),
    Habit({"Module": "(forward replaced)"}, AS_IN_TORCH, replace_forward),
    Habit(
        {"Module": "register_parameter"},
        AS_IN_TORCH,
        lambda loop: (
            loop.net.first.register_parameter("more", nn.Parameter(torch.ones(4, dtype=torch.float64))),
            loop.net.first.register_forward_hook(lambda module, args, out: out * 3 * module.more),
        ),
        "A new parameter is in no group of the optimizer, so it stays fixed.",
    ),
    Habit(
        {"Module": "load_state_dict set_extra_state apply to_empty"},
        AS_IN_TORCH,
        load_state_dict,
        STEP_MODULE,
    ),
    Habit(
        {"Tensor": "*_ data"},
        AS_IN_TORCH,
        write_parameters,
        STEP_MODULE + " A write is found by any alias of the memory that was made after `fp.prepare`.",
    ),
    Habit(
        {"Tensor": "set_ untyped_storage module_load", "torch.utils": "swap_tensors"},
        AS_IN_TORCH,
        write_storages,
        STEP_MODULE,
    ),
    Habit(
        {"Optimizer": "param_groups"},
        AS_IN_TORCH,
        lambda loop: loop.optimizer.param_groups[0].update(lr=0.02),
        "The rate, if `fp.prepare` has no scheduler.",
    ),
    Habit({"Optimizer": "load_state_dict"}, AS_IN_TORCH, load_rates, "Of an optimizer without a state: the rates."),
    Habit(
        {"LRScheduler": "step"},
        AS_IN_TORCH,
        own_scheduler,
        "Of a scheduler that `fp.prepare` was not given. The loop steps it.",
    ),
    Habit(
        {"Module": "register_full_backward_hook register_backward_hook"},
        REFUSED,
        lambda loop: loop.net.act.register_full_backward_hook(lambda module, inner, outer: (0 * inner[0],)),
        "Write the effect into the forward: `k * x + ((1 - k) * x).detach()` has the gradient `k`.",
        "act has the backward hook",
    ),
    Habit(
        {"Module": "register_full_backward_pre_hook"},
        REFUSED,
        lambda loop: loop.net.act.register_full_backward_pre_hook(lambda module, outer: (0 * outer[0],)),
        "The same.",
        "act has the backward pre-hook",
        before=True,
    ),
    Habit(
        {"torch.nn.modules.module": "register_module_full_backward_hook register_module_full_backward_pre_hook"},
        REFUSED,
        lambda loop: loop.kept.update(
            handle=of_modules.register_module_full_backward_hook(
                lambda module, inner, outer: (0 * inner[0],) if module is loop.net.act else None
            )
        ),
        "The same.",
        "every module has the backward hook",
    ),
    Habit(
        {"Tensor": "register_hook"},
        REFUSED,
        lambda loop: loop.net.first.weight.register_hook(ZEROS),
        "Write `w * mask + w.detach() * ~mask` in the forward, or an `fp.optim.Transformation` in `fp.optim.chain`.",
        "first.weight has the gradient hook `<lambda>`",
    ),
    Habit(
        {"Tensor": "register_post_accumulate_grad_hook"},
        REFUSED,
        lambda loop: loop.net.first.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)),
        "The same.",
        "first.weight has the post-accumulate-grad hook",
        before=True,
    ),
    Habit(
        {"Module": "requires_grad_", "Tensor": "requires_grad requires_grad_"},
        REFUSED,
        lambda loop: loop.net.first.weight.requires_grad_(False),
        "Set it before `fp.prepare`, or prepare a new step.",
        "requires_grad of the parameter first.weight of Net was True and is False",
    ),
    Habit(
        {"Module": "(a trained parameter replaced)"},
        REFUSED,
        lambda loop: loop.net.set_submodule("first", nn.Linear(4, 4).double()),
        "Write values into the parameter instead, after `step.module()`.",
        "the parameter first.weight of Net was replaced",
    ),
    Habit(
        {"Module": "(parameters written before step.module())"},
        REFUSED,
        lambda loop: (loop.step(batch(7)), loop.net.first.weight.data.mul_(2)),
        STEP_MODULE,
        "values were written into first.weight of Net",
    ),
    Habit(
        {
            "Module": "to type half bfloat16 float double cuda ipu xpu mtia",
            "Tensor": "t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_* as_strided_ sparse_resize*",
        },
        REFUSED,
        lambda loop: loop.current().float(),
        "To another dtype, shape or device: do it before `fp.prepare`.",
        "first.weight of Net has the dtype torch.float32, and the step has torch.float64",
    ),
    Habit(
        {"Optimizer": "param_groups"},
        REFUSED,
        lambda loop: loop.optimizer.param_groups[0].update(weight_decay=0.5),
        "Options other than the rate.",
        r"optimizer.param_groups\[0\]\['weight_decay'\] was 0 and is 0.5",
    ),
    Habit(
        {"Optimizer": "param_groups"},
        REFUSED,
        lambda loop: loop.optimizer.param_groups[0].update(lr=0.01),
        "The rate, if `fp.prepare` has a scheduler.",
        r"optimizer.param_groups\[0\]\['lr'\] was 0.1 and is 0.01",
        loop=RATE,
    ),
    Habit(
        {"Optimizer": "add_param_group"},
        REFUSED,
        add_group,
        "Add it before `fp.prepare`.",
        "optimizer.param_groups had 1 groups and has 2",
        recorded=True,
    ),
    Habit(
        {"Optimizer": "step"},
        REFUSED,
        lambda loop: optimizer_step(loop),
        "Without gradients it has no effect.",
        "values were written into|the optimizer has made steps",
        loop={"optimizer": "adamw"},
    ),
    Habit(
        {"Optimizer": "load_state_dict state"},
        REFUSED,
        load_optimizer,
        "Continue a run by `step.train.load` or `step.train.restore`.",
        "the optimizer has made steps, or has loaded a state",
        loop={"optimizer": "momentum"},
    ),
    Habit({"Optimizer": PRE_AND_POST}, REFUSED, hook_steps, "Call them in the loop.", "has step hooks"),
    Habit(
        {"torch.optim.optimizer": "register_optimizer_step_*"}, REFUSED, hook_all_steps, "The same.", "has step hooks"
    ),
    Habit(
        {"LRScheduler": "step load_state_dict recursive_undo last_epoch base_lrs scale_fn (other attributes)"},
        REFUSED,
        load_scheduler,
        "Of the scheduler that `fp.prepare` was given: a step steps a copy of it.",
        "scheduler.last_epoch was 0 and is 5",
        loop=RATE,
    ),
]

# Names of tensors that return a value and are no op of aten. A test finds names that are in no row and not here.
READS = (
    "H T as_subclass bfloat16 bool byte cdouble cfloat char dim_order double dtype eig float geqrf grad_fn half int "
    "ipu is_* itemsize kthvalue layout long lstsq lu max median min mode mtia name nanmedian nbytes ndim ndimension "
    "nelement new new_tensor qr reinforce shape short solve sort storage_type svd symeig to_sparse_coo topk "
    "triangular_solve type unique xlogy xpu"
)
