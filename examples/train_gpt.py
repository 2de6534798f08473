"""Train a byte-level GPT on real text, over any mesh.

    python examples/train_gpt.py --mesh data=2,tensor=2          # 4 simulated ranks in this process
    torchrun --nproc-per-node 4 examples/train_gpt.py --mesh data=2,tensor=2

Both print the same losses, to the bit. On `--mesh data=1` sums are taken in another order. In float64
(`--precision fp64`) its losses agree with these to 1e-12 of their value. In float32 they drift by rounding: by less
than 1e-3 in 400 steps.

`--zero 3` keeps parameters and optimizer state sharded over the data axis. `--precision`, `--remat` and `--accumulate`
need less memory too. `--sequence-parallel` shards the residual stream over time. An axis `pipe` cuts the model into
stages: `--mesh pipe=2,data=2 --schedule zb-h1`.

With `--save runs/gpt` a run that was killed goes on when it is started again, also by `torchrun --max-restarts`.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import gpt
import optree
import reporting
import torch

import functional_parallel as fp
from sharding_specs import Mesh, split

SHAPES = ("layers", "embed", "heads", "tied")  # what a saved model must have in common with one that goes on


def main() -> None:
    args = arguments()
    config = gpt.Config(args.layers, args.embed, args.heads, args.time, 256, args.sequence_parallel, args.tied)
    mesh = Mesh.parse(args.mesh)
    train_text, held_out = corpus.load(args.data)

    params, specs = split(gpt.init(config, args.seed))
    if args.precision == "fp64":
        params = optree.tree_map(torch.Tensor.double, params)
    specs = optree.tree_map(lambda spec: spec.only(mesh.axis_names), specs)  # axes that this mesh does not have
    train = fp.train_step(
        partial(gpt.loss, config=config),
        fp.optim.adamw(partial(learning_rate, args=args), betas=(0.9, 0.95), weight_decay=0.1),
        mesh,
        plan(specs, mesh, args),
        clip=1.0,
        reduction="ordered",  # processes add in the order of simulated ranks
    )
    tokens = corpus.batch(train_text, args.batch, args.time, 0, args.seed)
    state, losses = start(train, params, tokens, args)
    saver = fp.checkpoint.Saver(args.save, every=args.every, keep=2) if args.save else None
    say = print if fp.is_main_rank() else (lambda *_: None)
    say(f"{count(params):,} parameters on {mesh!r}, {len(train_text):,} bytes of text, {len(held_out):,} held out\n")

    train.lower(state, tokens)
    say(train.program.memory() if args.explain == "memory" else train.explain(group=args.explain), "\n")

    progress = reporting.progress(args.steps, state.step)
    began, first = time.perf_counter(), state.step
    while state.step < args.steps:
        tokens = corpus.batch(train_text, args.batch, args.time, state.step, args.seed)
        state, metrics = train(state, tokens)
        losses.append(float(metrics.loss))
        if saver is not None:
            saver(train, state, extra=run_so_far(losses, args))
        rate = (state.step - first) * args.batch * args.time / (time.perf_counter() - began)
        progress.update(loss=losses[-1], tokens_per_s=rate)
    progress.close()
    elapsed = time.perf_counter() - began

    if saver is not None:
        saver.wait()
        if state.step % args.every or state.step == first:
            train.save(state, args.save, extra=run_so_far(losses, args))
        say(f"saved step {state.step} to {args.save}")
    final = train.params(state)  # a collective under torchrun: every rank takes part
    if not fp.is_main_rank():
        return
    score = evaluate(final, held_out, config, args)
    reporting.plot(losses, score, Path(args.plot))
    text = gpt.sample(final, torch.tensor(list(b"def ")), args.sample, config)
    print(f"\nsample: {bytes(text.tolist()).decode(errors='replace')}")
    print(f"\n{state.step - first} steps in {elapsed:.0f} s, last loss {losses[-1] if losses else math.nan:.4f}")
    print(f"held-out loss: {score:.3f} nats per byte")


def plan(specs: Any, mesh: Mesh, args: argparse.Namespace) -> Any:
    """Tensor parallelism as the specs say, inside data parallelism or ZeRO, inside a pipeline, as the mesh says."""
    chosen: list[Any] = []
    if args.precision in ("bf16", "fp16"):
        chosen.append(fp.mixed_precision(args.precision))
    if args.remat:
        chosen.append(fp.remat("layers", every=args.remat))
    if "tensor" in mesh.axis_names:
        chosen.append(fp.tensor_parallel("tensor", specs))
    if "data" in mesh.axis_names:
        chosen.append(fp.zero(args.zero, "data"))
    if "pipe" in mesh.axis_names:
        chosen.append(fp.pipeline("pipe", schedule=args.schedule, microbatches=args.microbatches))
    elif args.accumulate > 1:
        chosen.append(fp.accumulate(args.accumulate))
    return fp.chain(*chosen)


def learning_rate(step: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """Linear warm-up over 20 steps, then a cosine down to a tenth."""
    warm = torch.clamp((step + 1) / 20, max=1.0)
    return args.lr * warm * (0.55 + 0.45 * torch.cos(math.pi * torch.clamp(step / args.steps, max=1.0)))


def evaluate(params: Any, held_out: torch.Tensor, config: gpt.Config, args: argparse.Namespace) -> float:
    """Mean loss on windows of files that were not trained on."""
    with torch.no_grad():
        batches = [corpus.batch(held_out, args.batch, args.time, step, seed=1) for step in range(args.evaluations)]
        return float(torch.stack([gpt.loss(params, tokens, config) for tokens in batches]).mean())


# -----------------------------------------------------------------------------
# Saving and resuming: checkpoints that any mesh, plan and precision can read
# -----------------------------------------------------------------------------


def run_so_far(losses: list[float], args: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint has beside the state."""
    return {"losses": losses, "settings": vars(args)}


def start(train: Any, params: Any, batch: Any, args: argparse.Namespace) -> tuple[Any, list[float]]:
    """A saved state: of `--resume`, or of a run that ended before in `--save`. Otherwise a fresh one.

    By the shapes of the batch, each rank of a pipeline holds only what its stages read.
    """
    folder = args.resume or args.save
    try:
        info = fp.checkpoint.inspect(folder) if folder else None
    except fp.errors.CheckpointError:
        if args.resume:
            raise
        info = None
    if info is None:
        return train.init(params, batch=batch), []
    changed = [name for name in SHAPES if info.extra["settings"].get(name) != getattr(args, name)]
    if changed:
        told = ", ".join(f"--{name} {info.extra['settings'].get(name)}" for name in changed)
        raise SystemExit(f"{folder} holds a model of {told}: resume with the same")
    return train.restore(folder, batch=batch), info.extra["losses"]


def count(params: Any) -> int:
    return sum(leaf.numel() for leaf in optree.tree_leaves(params))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="data=2,tensor=2", help="axes and sizes; 'data=1' for one rank")
    parser.add_argument("--zero", type=int, default=0, help="ZeRO stage over the data axis, 0 to 3")
    parser.add_argument(
        "--precision", choices=("fp64", "fp32", "bf16", "fp16"), default="fp32", help="dtype of compute"
    )
    parser.add_argument(
        "--remat", type=int, default=0, metavar="K", help="keep every K-th layer's result, recompute the rest"
    )
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="microbatches per step")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline, if the mesh has an axis 'pipe'")
    parser.add_argument("--microbatches", type=int, default=4, help="that pass through the pipeline per step")
    parser.add_argument("--tied", action="store_true", help="let the embedding be the head too")
    parser.add_argument("--sequence-parallel", action="store_true", help="shard the residual stream over time")
    parser.add_argument("--data", help="a text file or a folder of them; the standard library's source by default")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--time", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--embed", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=200, help="bytes of text to sample at the end")
    parser.add_argument("--evaluations", type=int, default=10, help="batches of held-out text to measure on")
    parser.add_argument(
        "--explain", choices=("axis", "line", "memory"), default="axis", help="group collectives, or show the memory"
    )
    parser.add_argument("--plot", default="runs/loss.png", help="where the loss plot goes")
    parser.add_argument("--save", metavar="DIR", help="save checkpoints there; if it has one, go on from it")
    parser.add_argument("--every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--resume", metavar="DIR", help="go on from a checkpoint there, on this mesh or another")
    return parser.parse_args()


if __name__ == "__main__":
    main()
