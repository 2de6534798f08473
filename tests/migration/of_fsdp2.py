"""Rows for scripts with `fully_shard`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import device_mesh, fsdp, tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

import functional_parallel as fp
from sharding_specs import Mesh

from .checks import DATA, close, counts, in_precision, recomputes, same_loop, traced_twice, trained, trains
from .names import Model, loss, params, x, y
from .row import Row

__all__ = ["LEFT", "ROWS"]


class Sharded(fsdp.FSDPModule, torch.nn.Module):
    """What `fully_shard` makes of a module."""


LEFT: dict[str, Any] = {
    "fully_shard": fsdp.fully_shard,
    "MixedPrecisionPolicy": fsdp.MixedPrecisionPolicy,
    "CPUOffloadPolicy": fsdp.CPUOffloadPolicy,
    "register_fsdp_forward_method": fsdp.register_fsdp_forward_method,
    "init_device_mesh": device_mesh.init_device_mesh,
    "Shard": tensor.Shard,
    "StateDictOptions": StateDictOptions,
    "get_model_state_dict": get_model_state_dict,
    "get_optimizer_state_dict": get_optimizer_state_dict,
    "set_model_state_dict": set_model_state_dict,
    "checkpoint_wrapper": checkpoint_wrapper,
    "model": Sharded,
    "module": torch.nn.Module,
    "torch": torch,
    "Model": Model,
    "block": torch.nn.Identity(),
}
HYBRID = Mesh(replica=2, shard=2)


def gathers_once(plan: Any) -> bool:
    return counts(plan)["all_gather"] < counts(fp.zero(3, "data"))["all_gather"]


def keeps_small_parameters(plan: Any) -> bool:
    shapes = {leaf.shape for leaf in params.values() if leaf.numel() < 16}
    gathered = [one.operand for one in trained(plan).program.collectives() if one.kind == "all_gather"]
    return bool(shapes) and all(each.numel >= 16 for each in gathered)


def gathers_earlier(plan: Any) -> bool:
    def at(plan: Any) -> list[int]:
        lines = trained(plan).program.lines()
        return [number for number, line in enumerate(lines) if "all_gather" in line]

    return sum(at(plan)) < sum(at(fp.zero(3, "data", prefetch=0)))


def sums_are_sums(_: object) -> bool:
    def total(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(params, x, y) * x.numel()

    step = fp.compile(fp.grad(fp.zero(3, "data")(total)), DATA)
    return close(step(params, x, y), torch.func.grad(total)(params, x, y))


def whole_state(found: Any) -> bool:
    weights, moments = found
    return close(weights, params) and moments.mean.keys() == params.keys()


ROWS = [
    Row(
        "fully_shard(module)",
        'fp.zero(3, "data")',
        trains(kinds="psum all_gather psum_scatter"),
        "Layers are found by the paths of their parameters. No module is wrapped.",
    ),
    Row(
        "fully_shard(module, reshard_after_forward=False)",
        'fp.zero(3, "data", keep_gathered=True)',
        gathers_once,
    ),
    Row(
        "fully_shard(module, reshard_after_forward=8)",
        'fp.chain(fp.zero(3, "shard"), fp.zero(1, "replica"))',
        trains(HYBRID, "psum all_gather psum_scatter"),
        "Nearest equivalent: parameters are sharded over one axis, and optimizer state over both.",
    ),
    Row(
        "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
        "fully_shard(module, mp_policy=policy)",
        'fp.chain(fp.mixed_precision("bf16", reduce="fp32"), fp.zero(3, "data"))',
        in_precision("bf16"),
        'Parameters are gathered in bfloat16. `params="fp32"` gathers float32.',
    ),
    Row(
        'hosts = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replica", "shard"))\n'
        "fully_shard(module, mesh=hosts)",
        'fp.chain(fp.zero(3, "shard"), fp.data_parallel("replica"))',
        trains(HYBRID, "psum all_gather psum_scatter"),
        "HSDP. Gradients are scattered over the shards first.",
    ),
    Row(
        "fully_shard(module, offload_policy=CPUOffloadPolicy())",
        'fp.chain(fp.zero(3, "data"), fp.offload(state="host", parameters="host"))',
        trains(DATA, "psum all_gather psum_scatter"),
        'State alone: `fp.offload(state="host")`. See [memory tiers](memory_tiers.md).',
    ),
    Row(
        "fully_shard(module, shard_placement_fn=lambda parameter: Shard(1))",
        'fp.zero(3, "data", specs={"*weight": P(None, "data"), "*": P("data")})',
        trains(),
        "Dims that the axis does not divide are padded at rest, at every dim.",
    ),
    Row(
        "fully_shard(module, ignored_params=small)",
        'fp.zero(3, "data", whole_below=16)',
        keeps_small_parameters,
        "Or give `specs` with `P()` for these parameters. They stay replicated, and their gradients are summed.",
    ),
    Row(
        "model.set_modules_to_forward_prefetch(layers)",
        'fp.zero(3, "data", prefetch=2)',
        gathers_earlier,
        "The number of layers between a gather and its use.",
    ),
    Row(
        "model.set_requires_gradient_sync(False)",
        'fp.chain(fp.zero(3, "data"), fp.accumulate(4))',
        lambda plan: counts(plan)["psum_scatter"] == counts(fp.zero(3, "data"))["psum_scatter"],
        "One reduce-scatter per step.",
    ),
    Row(
        "model.set_gradient_divide_factor(1.0)",
        "",
        sums_are_sums,
        "The loss is written for the global batch. The gradient of a mean is a mean, the gradient of a sum is a sum.",
    ),
    Row(
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        'fp.train_step(loss, adamw, mesh, fp.zero(3, "data"), clip=0.1)',
        lambda train: same_loop(train, clip=0.1),
        "Every element counts once, on every mesh.",
    ),
    Row(
        "options = StateDictOptions(full_state_dict=True)\nget_model_state_dict(model, options=options)\n"
        "get_optimizer_state_dict(model, optimizer, options=options)",
        "train.whole(state)",
        whole_state,
        "Full parameters and optimizer state. `train.load` takes them on any mesh.",
    ),
    Row(
        "model.unshard()",
        "train.params(state)",
        lambda found: close(found, params),
        "Returns full parameters. The state stays sharded.",
    ),
    Row(
        'with torch.device("meta"): module = Model()\nmodule.to_empty(device="cuda")',
        "state = train.init(lambda: fp.functional(Model())[1])\ntrain(state, x, y)",
        lambda found: found[0].step == 1,
        "Parameters are created leaf by leaf, in their layout. No rank holds the model.",
    ),
    Row(
        "options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)\n"
        "set_model_state_dict(model, full_state, options=options)",
        "fn, params = fp.load_pretrained(small_llama(), mesh, plan)\nparams.specs",
        lambda found: len(found) == 12,
        "Of a Hugging Face folder. No rank reads or sends the full model.",
    ),
    Row(
        "checkpoint_wrapper(layer)",
        'fp.remat("layers")',
        recomputes,
        "`torch.utils.checkpoint.checkpoint` in the model's code is followed too.",
    ),
    Row(
        "torch.compiler.nested_compile_region(block)",
        "fp.repeated(lambda h, w: torch.sin(h @ w))",
        traced_twice,
        "A block of a model that is called for many layers. A plain loop over equal layers needs no mark.",
    ),
    Row(
        'register_fsdp_forward_method(model, "generate")',
        "predict = train.compile(plan(lambda params, x: fn(params, x)))\npredict(state, x)",
        lambda found: found.shape == (8, 4),
        "Any function of the parameters is compiled for the sharded state.",
    ),
    Row("model.set_all_reduce_hook(hook)", limit="hooks in collectives"),
]
