"""Rows for scripts with `DTensor` and `parallelize_module`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint, device_mesh, tensor
from torch.distributed.tensor import debug, experimental, parallel

import functional_parallel as fp
from sharding_specs import Mesh, P, shard

from .checks import BODY, close, in_body, trained
from .names import x
from .row import Row

__all__ = ["LEFT", "ROWS"]

LEFT: dict[str, Any] = {
    "init_device_mesh": device_mesh.init_device_mesh,
    "DeviceMesh": device_mesh.DeviceMesh,
    "x": tensor.DTensor,
    "dcp": checkpoint,
    **{name: getattr(tensor, name) for name in ("DTensor", "Shard", "Replicate", "Partial", "distribute_tensor")},
    **{name: getattr(parallel, name) for name in parallel.__all__},
    **{name: getattr(experimental, name) for name in experimental.__all__},
    "CommDebugMode": debug.CommDebugMode,
}
TENSOR, BOTH = Mesh(tensor=2), Mesh(data=2, tensor=2)
HALVES = BODY[:2], BODY[2:]


def spec_of(shape: tuple[int, ...]) -> Any:
    """Check of a spec: the shape of a rank's shard of a tensor of 4 × 4, on `BOTH`."""
    return lambda spec: shard(BODY, spec, BOTH, 0).shape == shape


def partial_is_summed(spec: Any) -> bool:
    step = fp.shard_map(lambda x: fp.pcast(x, "data", to="unreduced"), Mesh(data=2), P("data"), spec)
    return close(step(BODY), HALVES[0] + HALVES[1])


def tensor_parallel(plan: Any) -> bool:
    """Megatron's pattern: one sum per block in the forward, one in the backward of all but the first."""
    found = [one for one in trained(plan, TENSOR).program.collectives() if one.operand.ndim > 1]
    return {one.kind for one in found} == {"psum"} and len(found) == 3


def sequence_is_sharded(f: Any) -> bool:
    plan = fp.tensor_parallel("tensor", {"up": P(None, "tensor"), "down": P("tensor")})
    weights = {"up": torch.ones(4, 8), "down": torch.ones(8, 4)}
    step = fp.compile(plan(lambda w, x: (f(x @ w["up"] @ w["down"]) ** 2).sum()), TENSOR)
    wanted = ((x[None] @ weights["up"] @ weights["down"]) ** 2).sum()
    return close(step(weights, x[None]), wanted) and ("psum_scatter", ("tensor",)) in step.program.counts()


def vocabulary_is_sharded(plan: Any) -> bool:
    def of(params: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x @ params["head"], labels)

    weights, labels = {"head": torch.randn(4, 16)}, torch.arange(8)
    step = fp.compile(fp.grad(plan(of)), TENSOR)
    same = close(step(weights, x, labels), torch.func.grad(of)(weights, x, labels))
    return same and "all_gather" not in {kind for kind, _ in step.program.counts()}


@torch.library.custom_op("mylib::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def rule_is_used(_: object) -> bool:
    plan = fp.tensor_parallel("tensor", {"w": P("tensor")}, strict=True)
    step = fp.compile(plan(lambda p: torch.ops.mylib.double(p["w"]).sum()), TENSOR)
    return step({"w": torch.ones(4)}).item() == 8 and step.program.counts() == {("psum", ("tensor",)): 1}


def plain_tensors_are_replicated(plan: Any) -> bool:
    scale = torch.arange(4.0)
    step = fp.compile(plan(lambda w, x: ((x * scale) @ w).sum()), Mesh(data=2))
    return close(step(torch.ones(4), x), (x * scale).sum())


ROWS = [
    Row(
        'init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))',
        "Mesh(data=2, tensor=2)",
        lambda mesh: mesh.size == 4,
        "Without a launcher, one process simulates all ranks.",
    ),
    Row(
        'DeviceMesh("cuda", [0, 2, 3], mesh_dim_names=("data",))',
        "Mesh(data=3, ranks=[0, 2, 3])",
        lambda mesh: [*mesh.processes] == [0, 2, 3],
        "The other processes call `train.init` and `train.load` only.",
    ),
    Row("[Shard(0), Replicate()]", 'P("data")', spec_of((2, 4)), "On the mesh of the first row."),
    Row("[Replicate(), Shard(1)]", 'P(None, "tensor")', spec_of((4, 2))),
    Row("[Shard(0), Shard(1)]", 'P("data", "tensor")', spec_of((2, 2))),
    Row("[Shard(0), Shard(0)]", 'P(("data", "tensor"))', spec_of((1, 4)), "The first axis is major."),
    Row("[Replicate(), Replicate()]", "P()", spec_of((4, 4))),
    Row("[Partial(), Replicate()]", 'P(unreduced={"data"})', partial_is_summed),
    Row(
        "distribute_tensor(x, mesh, [Shard(0), Replicate()])",
        'shard(x, P("data"), Mesh(data=2, tensor=2), rank=0)',
        lambda part: close(part, x[:4]),
        "Rarely needed: compiled functions take full tensors.",
    ),
    Row(
        "x.full_tensor()",
        'parts = [shard(x, P("data"), mesh, rank) for rank in mesh.ranks]\nunshard(parts, P("data"), mesh)',
        lambda found: close(found, x),
        "Rarely needed: compiled functions return full tensors.",
    ),
    Row(
        "x.redistribute(placements=[Replicate(), Shard(0)])",
        'lambda x: fp.relayout(x, held=P("tensor"), wanted=P())',
        in_body(P("tensor"), P(), BODY),
        "Between any two specs, as in `P(None, ('data', 'tensor'))`; the rows below are the collectives for one axis.",
    ),
    Row(
        "x.redistribute(placements=[Replicate()])",
        'lambda x: fp.all_gather(x, "tensor", dim=0, to="invariant")',
        in_body(P("tensor"), P(), BODY),
        "From `Shard(0)`.",
    ),
    Row(
        "x.redistribute(placements=[Replicate()])",
        'lambda x: fp.psum(x, "tensor")',
        in_body(P("tensor"), P(), HALVES[0] + HALVES[1]),
        "From `Partial()`.",
    ),
    Row(
        "x.redistribute(placements=[Shard(0)])",
        'lambda x: fp.psum_scatter(x, "tensor", dim=0)',
        in_body(P("tensor"), P("tensor"), HALVES[0] + HALVES[1]),
        "From `Partial()`.",
    ),
    Row(
        "x.redistribute(placements=[Shard(1)])",
        'lambda x: fp.all_to_all(x, "tensor", split_dim=1, concat_dim=0)',
        in_body(P("tensor"), P(None, "tensor"), BODY),
        "From `Shard(0)`.",
    ),
    Row(
        "x.redistribute(placements=[Shard(0)])",
        'lambda x: fp.pscatter(x, "tensor", dim=0)',
        in_body(P(), P("tensor"), BODY),
        "From `Replicate()`.",
    ),
    Row(
        'Partial("max")',
        'lambda x: fp.pmax(x.detach(), "tensor")',
        in_body(P("tensor"), P(), HALVES[1]),
        "Sums are the only partial values with a type; other reductions are collectives.",
    ),
    Row(
        "DTensor.from_local(x, mesh, [Shard(0)])",
        'fp.shard_map(lambda x: 2 * x, mesh, in_specs=P("data"), out_specs=P("data"))',
        lambda f: close(f(x), 2 * x),
        "The body sees local tensors.",
    ),
    Row(
        "local_map(f, out_placements=[Replicate()], in_placements=([Shard(0)],))",
        'fp.shard_map(lambda x: fp.psum(x.sum(0), "data"), mesh, in_specs=P("data"), out_specs=P())',
        lambda f: close(f(x), x.sum(0)),
        "A wrong out spec is an error.",
    ),
    Row(
        'plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}\n'
        "parallelize_module(module, mesh, plan)",
        'rules = {"*up.*": P("tensor"), "*down.weight": P(None, "tensor"), "*": P()}\n'
        'fp.tensor_parallel("tensor", rules)',
        tensor_parallel,
        "Rules name parameters. Layouts of activations follow. The model's code keeps its global sizes.",
    ),
    Row(
        "PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())",
        "",
        lambda _: tensor_parallel(
            fp.tensor_parallel("tensor", {"*up.*": P("tensor"), "*down.weight": P(None, "tensor"), "*": P()})
        ),
        "Collectives are inserted where an op needs another layout. `explain` lists them.",
    ),
    Row(
        "SequenceParallel()",
        'lambda x: fp.constrain(x, "batch time/tensor embed")',
        sequence_is_sharded,
        "In the model, on each residual edge. The sum before it becomes a reduce-scatter.",
    ),
    Row(
        "loss_parallel()",
        'fp.tensor_parallel("tensor", {"head": P(None, "tensor")})',
        vocabulary_is_sharded,
        "A cross entropy of sharded logits gathers none of them.",
    ),
    Row(
        "register_sharding(op)",
        'fp.register_rule(torch.ops.mylib.double, "... -> ...")',
        rule_is_used,
        "See [rules](rules.md#a-rule-for-your-own-op).",
    ),
    Row(
        "implicit_replication()",
        "",
        lambda _: plain_tensors_are_replicated(fp.data_parallel("data")),
        "A tensor that the function closes over is replicated.",
    ),
    Row(
        "CommDebugMode()",
        "train(state, x, y)\ntrain.program.counts()",
        lambda found: found == {("psum", ("data",)): 2},
        "`train.explain()` adds bytes and source lines.",
    ),
    Row(
        'dcp.save({"model": state_dict}, checkpoint_id="folder")',
        "train.save(state, folder)\ntrain.restore(folder)",
        lambda loaded: loaded.step == 0,
        "Each rank writes its shards, and any mesh and plan can restore them.",
    ),
]
