"""Rows for arguments of Megatron-LM and names of megatron.core."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import functional_parallel as fp
from sharding_specs import Mesh, P

from .checks import (
    BODY,
    DATA,
    UNCHANGED,
    close,
    first_loss,
    in_body,
    in_precision,
    moves_activations,
    products,
    recomputes,
    same_loop,
    splits_activations,
    trained,
    trains,
)
from .names import Model, loss, params, x, y
from .of_deepspeed import reduces_early, scaled
from .of_dtensor import sequence_is_sharded, tensor_parallel, vocabulary_is_sharded
from .row import Row

__all__ = ["ROWS"]

TENSOR, PIPE = Mesh(tensor=2), Mesh(pipe=2)
HALVES = BODY[:2], BODY[2:]


def embedding_is_sharded(plan: Any) -> bool:
    def of(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, params["table"]).square().sum()

    weights, tokens = {"table": torch.randn(16, 4)}, torch.arange(8)
    step = fp.compile(fp.grad(plan(of)), TENSOR)
    same = close(step(weights, tokens), torch.func.grad(of)(weights, tokens))
    return same and "all_gather" not in {kind for kind, _ in step.program.counts()}


def two_chunks(plan: Any) -> bool:
    return len(set(trained(plan, PIPE).program.schedule.rank_of_stage)) == 2 and stages(plan) == 4


def stages(plan: Any) -> int:
    return len(trained(plan, PIPE).program.schedule.rank_of_stage)


def attention_is_recomputed(plan: Any) -> bool:
    def attend(params: Any, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(x @ params["k"] @ x.T, -1)
        return (scores @ x).square().sum()

    arguments = {"k": torch.randn(4, 4)}, x
    return products(plan, attend, arguments) > products(UNCHANGED, attend, arguments)


def marked(f: Any) -> bool:
    def of(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (f(x @ params["first"]) @ params["second"]).sum()

    weights = {"first": torch.ones(4, 8), "second": torch.ones(8, 4)}
    step = fp.compile(fp.grad(fp.pipeline("pipe", microbatches=2)(of)), PIPE)
    return close(step(weights, x), torch.func.grad(of)(weights, x))


def mean_over_tokens(f: Any) -> bool:
    """The mean over all real tokens, with unequal numbers of them on the ranks."""
    mask = torch.arange(8) < 5
    step = fp.compile(fp.data_parallel("data")(lambda w, x, mask: f((x @ w), mask)), DATA)
    w = torch.ones(4)
    return close(step(w, x, mask), (x @ w)[:5].mean())


def drops_alike(_: object) -> bool:
    def of(params: Any, x: torch.Tensor) -> torch.Tensor:
        return fp.random.dropout(x @ params["w"], 0.5).square().mean()

    def value(mesh: Mesh, plan: Any) -> torch.Tensor:
        train = fp.train_step(of, fp.optim.sgd(0.1), mesh, plan, seed=1)
        return train(train.init({"w": torch.ones(4, 4)}), x)[1].loss

    return close(value(TENSOR, fp.tensor_parallel("tensor", {"w": P(None, "tensor")})), value(Mesh(), None))


def varies(in_spec: P) -> Any:
    """Check of a function of a shard: every rank gets all of `BODY`, as a value that varies."""
    return lambda f: in_body(in_spec, P(), BODY)(lambda x: fp.psum(f(x), "tensor") / 2)


def warms_up(optimizer: fp.optim.Optimizer) -> bool:
    train = fp.train_step(loss, optimizer, DATA, fp.zero(1, "data"))
    _, metrics = train(train.init(params), x, y)
    return close(float(metrics.lr), 0.005)


def same_start(found: Any) -> bool:
    torch.manual_seed(0)
    return close(found, fp.functional(Model())[1])


ROWS = [
    Row(
        "--tensor-model-parallel-size 2",
        'rules = {"*up.*": P("tensor"), "*down.weight": P(None, "tensor"), "*": P()}\n'
        'fp.tensor_parallel("tensor", rules)',
        tensor_parallel,
        "On `Mesh(tensor=2)`. The rules replace `ColumnParallelLinear` and `RowParallelLinear`, in modules of torch.",
    ),
    Row(
        "VocabParallelEmbedding",
        'fp.tensor_parallel("tensor", {"table": P("tensor")})',
        embedding_is_sharded,
    ),
    Row(
        "vocab_parallel_cross_entropy(logits, labels)",
        'fp.tensor_parallel("tensor", {"head": P(None, "tensor")})',
        vocabulary_is_sharded,
        "The loss is `torch.nn.functional.cross_entropy`.",
    ),
    Row(
        "--sequence-parallel",
        'lambda x: fp.constrain(x, "batch time/tensor embed")',
        sequence_is_sharded,
        "In the model, on each residual edge.",
    ),
    Row(
        "--pipeline-model-parallel-size 2",
        'fp.pipeline("pipe", microbatches=4)',
        trains(PIPE, "send"),
        "On `Mesh(pipe=2)`.",
    ),
    Row(
        "--num-virtual-stages-per-pipeline-rank 2",
        'fp.pipeline("pipe", microbatches=4, schedule="interleaved", chunks=2)',
        two_chunks,
        "With 24 layers on 4 ranks, `--num-layers-per-virtual-pipeline-stage 3` is `chunks=2`.",
    ),
    Row(
        "--decoder-first-pipeline-num-layers 1",
        "lambda h: fp.stage_boundary(h)",
        marked,
        "In the model, where the next stage begins.",
    ),
    Row(
        "--micro-batch-size 2 --global-batch-size 8",
        'plan = fp.chain(plan, fp.pipeline("pipe", microbatches=2))\n'
        "train = fp.train_step(loss, adamw, Mesh(pipe=2, data=2), plan)\n"
        "state, metrics = train(train.init(params), x, y)",
        lambda found: first_loss(found[1].loss),
        "Global batch = microbatch · microbatches · data ranks: 8 = 2 · 2 · 2. Without a pipeline: `fp.accumulate(2)`.",
    ),
    Row(
        "--use-distributed-optimizer",
        'fp.zero(1, "data")',
        trains(kinds="psum psum_scatter all_gather"),
        '`layout="flat"` shards one vector of all parameters.',
    ),
    Row(
        "--data-parallel-sharding-strategy optim_grads_params",
        'fp.zero(3, "data")',
        trains(kinds="psum psum_scatter all_gather"),
        "`optim` is stage 1, `optim_grads` is stage 2.",
    ),
    Row(
        "--num-distributed-optimizer-instances 2",
        'fp.chain(fp.zero(1, "shard"), fp.data_parallel("replica"))',
        trains(Mesh(replica=2, shard=2)),
        "On a mesh with `replica=2`.",
    ),
    Row(
        "--overlap-grad-reduce",
        "",
        reduces_early,
        "A bucket of gradients is reduced when it is complete.",
    ),
    Row(
        "--ddp-bucket-size 40000000",
        'fp.train_step(loss, adamw, mesh, fp.zero(1, "data"), bucket=160_000_000)',
        same_loop,
        "Here in bytes.",
    ),
    Row(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        'fp.remat("layers", every=1)',
        recomputes,
    ),
    Row(
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        'fp.remat("layers", where="layers.0*")',
        recomputes,
        "`where` is a pattern for the paths of layers.",
    ),
    Row(
        "--recompute-granularity selective --recompute-modules core_attn",
        'fp.remat("attention")',
        attention_is_recomputed,
        '`fp.remat(budget="8GiB")` recomputes as little as fits.',
    ),
    Row(
        "--fine-grained-activation-offloading",
        'fp.offload(activations="host")',
        moves_activations,
        "Also with `fp.remat`, in pipelines, and `fraction=0.5` for a share.",
    ),
    Row(
        "--distribute-saved-activations",
        'fp.partition_activations("tensor")',
        splits_activations,
        "With `fp.remat()` they are the inputs of layers. `at_least=` is the least size.",
    ),
    Row(
        "--bf16 --accumulate-allreduce-grads-in-fp32",
        'fp.chain(fp.mixed_precision("bf16", reduce="fp32"), fp.zero(1, "data"))',
        in_precision("bf16"),
        '`--grad-reduce-in-bf16` is `reduce="bf16"`.',
    ),
    Row(
        "--fp16 --initial-loss-scale 1024",
        "scale = fp.LossScale.like_megatron(initial=1024)\n"
        'fp.chain(fp.mixed_precision("fp16", loss_scale=scale), fp.zero(1, "data"))',
        scaled(1024),
    ),
    Row(
        "--clip-grad 0.1",
        'fp.train_step(loss, adamw, mesh, fp.zero(1, "data"), clip=0.1)',
        lambda train: same_loop(train, clip=0.1),
    ),
    Row(
        "--lr 0.01 --lr-decay-style cosine --lr-decay-iters 10 --lr-warmup-iters 2",
        "rate = fp.optim.schedules.cosine(0.01, 10, warmup=2)\nfp.optim.adamw(rate)",
        warms_up,
    ),
    Row(
        "--calculate-per-token-loss",
        "lambda losses, mask: (losses * mask).sum() / mask.sum()",
        mean_over_tokens,
        "The loss is written for the global batch, so its sums are over all ranks and microbatches.",
    ),
    Row(
        "--seed 1",
        "",
        drops_alike,
        "`train_step(seed=1)`. Dropout is the same on every mesh.",
    ),
    Row(
        "--use-cpu-initialization",
        "torch.manual_seed(0)\nstate = train.init(lambda: fp.functional(Model())[1])\ntrain.params(state)",
        same_start,
        "Initial values do not depend on the mesh.",
    ),
    Row(
        "copy_to_tensor_model_parallel_region(x)",
        'lambda x: fp.pvary(x, "tensor")',
        varies(P()),
        "Megatron's *f* is `pvary`. This row and the next rows are lines in the body of `fp.shard_map`.",
    ),
    Row(
        "reduce_from_tensor_model_parallel_region(x)",
        'lambda x: fp.psum(x, "tensor")',
        in_body(P("tensor"), P(), HALVES[0] + HALVES[1]),
        "Megatron's *g*.",
    ),
    Row(
        "scatter_to_tensor_model_parallel_region(x)",
        'lambda x: fp.pscatter(x, "tensor", dim=1)',
        in_body(P(), P(None, "tensor"), BODY),
    ),
    Row(
        "gather_from_tensor_model_parallel_region(x)",
        'lambda x: fp.all_gather(x, "tensor", dim=1, to="invariant")',
        in_body(P(None, "tensor"), P(), BODY),
    ),
    Row(
        "gather_from_sequence_parallel_region(x)",
        'lambda x: fp.all_gather(x, "tensor", dim=0)',
        varies(P("tensor")),
        "Its transpose is `psum_scatter`.",
    ),
    Row(
        "reduce_scatter_to_sequence_parallel_region(x)",
        'lambda x: fp.psum_scatter(x, "tensor", dim=0)',
        in_body(P("tensor"), P("tensor"), HALVES[0] + HALVES[1]),
    ),
    Row("--context-parallel-size 2", limit="context parallelism"),
    Row("--expert-model-parallel-size 2", limit="expert parallelism"),
    Row("--fp8-format hybrid", limit="FP8"),
    Row(
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        'fp.chain(fp.zero(1, "data"), fp.offload(state="host", fraction=0.5))',
        trains(Mesh(data=2), "psum psum_scatter all_gather"),
    ),
    Row("--tp-comm-overlap", limit="overlap of a matrix product with its own collective"),
    Row(
        "--async-save",
        "saver = fp.checkpoint.Saver(folder, every=100, keep=3)\nsaver(train, state)\nsaver.wait()\n"
        "train.restore(folder)",
        lambda loaded: loaded.step == 0,
        "A thread of each rank writes while the steps continue.",
    ),
]
