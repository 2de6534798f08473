"""Habits of a torch loop with `fp.prepare`: names that change state, their effect, and a function that uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as of_modules
from torch.optim import lr_scheduler

from . import habits
from .loops import Loop, batch

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
        habits.read_module,
        "The module has the values of `fp.prepare`, or of the last `step.module()`.",
    ),
    Habit(
        {
            "Module": "zero_grad",
            "Optimizer": "zero_grad",
            "Tensor": "backward grad grad_dtype retain_grad retains_grad",
        },
        NO_EFFECT,
        lambda loop: (habits.backward(loop), loop.net.zero_grad(), loop.optimizer.zero_grad(), habits.backward(loop)),
        "A step begins without gradients, as a loop that calls `zero_grad` first. It leaves none in `.grad`.",
    ),
    Habit(
        {
            "Module": "register_state_dict_* register_load_state_dict_*",
            "Optimizer": "register_state_dict_* register_load_state_dict_*",
        },
        NO_EFFECT,
        habits.hook_state_dicts,
        "torch calls them in `state_dict` and `load_state_dict`.",
    ),
    Habit(
        {"Optimizer": "state_dict defaults profile_hook_step", "LRScheduler": "state_dict get_* optimizer"},
        NO_EFFECT,
        habits.read_scheduler,
        "`step.metrics.lr` has the rates of a step.",
        loop=RATE,
    ),
    Habit(
        {
            "Module": "share_memory cpu",
            "Tensor": "share_memory_ is_shared numpy data_ptr const_data_ptr tolist storage record_stream",
        },
        NO_EFFECT,
        lambda loop: (habits.save_all(loop), loop.net.cpu(), loop.net.share_memory()),
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
        habits.record_forwards,
        "A hook that returns nothing runs once, while the step is traced. `SideEffectWarning` names it. Return the "
        "values from the loss, with `has_aux=True`.",
        "hook_forwards|forward hook `<lambda>` \\(habits.py:\\d+\\) of first",
        recorded=True,
    ),
    Habit(
        {"Module": "(an attribute that forward sets)"},
        NO_EFFECT,
        habits.keep_in_attribute,
        "It is set once, while the step is traced. `SideEffectWarning` names it.",
        "last was None and is a tensor of shape",
        recorded=True,
    ),
    Habit(
        {"Module": "register_forward_hook register_forward_pre_hook"},
        AS_IN_TORCH,
        habits.hook_forwards,
        "The step is retraced if a hook is added or removed.",
    ),
    Habit(
        {"torch.nn.modules.module": "register_module_forward_hook register_module_forward_pre_hook"},
        AS_IN_TORCH,
        habits.hook_all_forwards,
    ),
    Habit(
        {"Module": "train eval training"},
        AS_IN_TORCH,
        habits.mode,
        "There is a program for each mode. `step.eval` evaluates in the mode `eval`.",
    ),
    Habit(
        {"Module": "(a plain attribute)"},
        AS_IN_TORCH,
        lambda loop: (setattr(loop.net, "scale", 2.0), loop.net.factors.__setitem__(0, 0.5)),
        "The step is retraced. Pass values that change often as arguments of the loss.",
    ),
    Habit(
        {"Module": "add_module register_module set_submodule"},
        AS_IN_TORCH,
        habits.replace_submodule,
        "Of a submodule without trained parameters.",
    ),
    Habit(
        {"Module": "register_buffer", "Tensor": "real imag"},
        AS_IN_TORCH,
        habits.buffers,
        "Buffers, and parameters that are not trained, may be written or replaced at any time.",
    ),
    Habit({"Module": "(forward replaced)"}, AS_IN_TORCH, habits.replace_forward),
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
        habits.load_state_dict,
        STEP_MODULE,
    ),
    Habit(
        {"Tensor": "*_ data"},
        AS_IN_TORCH,
        habits.write_parameters,
        STEP_MODULE + " A write is found by any alias of the memory that was made after `fp.prepare`.",
    ),
    Habit(
        {"Tensor": "set_ untyped_storage module_load", "torch.utils": "swap_tensors"},
        AS_IN_TORCH,
        habits.write_storages,
        STEP_MODULE,
    ),
    Habit(
        {"Optimizer": "param_groups"},
        AS_IN_TORCH,
        lambda loop: loop.optimizer.param_groups[0].update(lr=0.02),
        "The rate, if `fp.prepare` has no scheduler.",
    ),
    Habit(
        {"Optimizer": "load_state_dict"}, AS_IN_TORCH, habits.load_rates, "Of an optimizer without a state: the rates."
    ),
    Habit(
        {"LRScheduler": "step"},
        AS_IN_TORCH,
        habits.own_scheduler,
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
        habits.add_group,
        "Add it before `fp.prepare`.",
        "optimizer.param_groups had 1 groups and has 2",
        recorded=True,
    ),
    Habit(
        {"Optimizer": "step"},
        REFUSED,
        lambda loop: habits.optimizer_step(loop),
        "Without gradients it has no effect.",
        "values were written into|the optimizer has made steps",
        loop={"optimizer": "adamw"},
    ),
    Habit(
        {"Optimizer": "load_state_dict state"},
        REFUSED,
        habits.load_optimizer,
        "Continue a run by `step.train.load` or `step.train.restore`.",
        "the optimizer has made steps, or has loaded a state",
        loop={"optimizer": "momentum"},
    ),
    Habit({"Optimizer": PRE_AND_POST}, REFUSED, habits.hook_steps, "Call them in the loop.", "has step hooks"),
    Habit(
        {"torch.optim.optimizer": "register_optimizer_step_*"},
        REFUSED,
        habits.hook_all_steps,
        "The same.",
        "has step hooks",
    ),
    Habit(
        {"LRScheduler": "step load_state_dict recursive_undo last_epoch base_lrs scale_fn (other attributes)"},
        REFUSED,
        habits.load_scheduler,
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
