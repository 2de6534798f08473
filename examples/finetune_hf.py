"""Fine-tune a Hugging Face model on text, from a folder to a folder: all parameters, or LoRA by peft.

    python examples/finetune_hf.py --mesh data=2,tensor=2
    torchrun --nproc-per-node 4 examples/finetune_hf.py --mesh data=2,tensor=2 --lora 4

The model comes from `--model`, a folder of safetensors; by default a small random Llama of bytes is made. Each rank
reads the slices that it holds. Axes of the mesh are `data` (ZeRO-3), `tensor` (the model's own rules) and `pipe`
(stages); `--plan` takes any other plan, as `plan.to_json()` prints it. With `--save` a run that was killed goes on when
it is started again, also on another mesh; of LoRA a checkpoint has the adapters alone. The result is a folder for
transformers, or of LoRA one for peft.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import corpus
import torch
import transformers

import functional_parallel as fp
from sharding_specs import Mesh, rules


def main() -> None:
    args = arguments()
    say = print if fp.is_main_rank() else (lambda *_: None)
    folder, mesh = args.model or small_llama(args), Mesh.parse(args.mesh)
    text, held_out = tokens(folder, args.data)
    adapt = (lambda model: with_lora(model, args.lora)) if args.lora else None
    fn, params = fp.load_pretrained(folder, mesh, lambda model: plan_of(model, mesh, args), adapt=adapt)
    say(f"{params.mesh!r}: {sum(x.numel() for x in params.shapes.values()):,} parameters from {folder}")

    def loss(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return fn(params, input_ids=tokens, labels=tokens, use_cache=False).loss

    optimizer = fp.optim.adamw(args.lr)
    optimizer = fp.optim.by_path({"*lora_*": optimizer, "*": None}) if args.lora else optimizer
    plan = plan_of(fn.module, mesh, args)
    train = fp.train_step(loss, optimizer, mesh, plan, clip=1.0, reduction="ordered")
    evaluate = train.compile(plan(loss))
    batch = corpus.batch(text, args.batch, args.time, 0, args.seed)
    if args.save and Path(args.save).exists():
        state = train.restore(args.save, like=params, batch=batch)
    else:
        state = train.init(params, batch=batch)
    del params
    only = "trained" if args.lora else None
    test = corpus.batch(held_out, args.batch, args.time, 0, args.seed)
    say(f"step {state.step}, held-out loss {evaluate(state, test):.6f}")
    while state.step < args.steps:
        state, metrics = train(state, corpus.batch(text, args.batch, args.time, state.step, args.seed))
        say(f"step {state.step}, loss {metrics.loss:.6f}")
        if args.save and (state.step % args.every == 0 or state.step == args.steps):
            train.save(state, args.save, only=only)
    say(f"step {state.step}, held-out loss {evaluate(state, test):.6f}")
    if args.out:
        write(train, state, fn, args)
        say(f"wrote {args.out}")


def plan_of(model: torch.nn.Module, mesh: Mesh, args: argparse.Namespace) -> fp.Plan:
    """Return the plan of the arguments, or one that uses each axis of the mesh."""
    if args.plan:
        return fp.Plan.from_json(args.plan)
    plan: list[fp.Transform] = []
    if "tensor" in mesh.axes:
        plan.append(fp.tensor_parallel("tensor", rules.for_model(model, mesh=mesh)))
    if "data" in mesh.axes:
        plan.append(fp.zero(1 if "pipe" in mesh.axes else 3, "data"))
    if "pipe" in mesh.axes:
        plan.append(fp.pipeline("pipe", microbatches=args.microbatches))
    elif args.microbatches > 1:
        plan.append(fp.accumulate(args.microbatches))
    return fp.chain(*plan)


def with_lora(model: Any, rank: int) -> torch.nn.Module:
    """Add adapters, whose values are made here, to a model without values. The optimizer freezes the others."""
    import peft

    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    for layer in adapted.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    return adapted.requires_grad_(True)


def write(train: Any, state: fp.TrainState, fn: Any, args: argparse.Namespace) -> None:
    """Write a folder for transformers, or with the adapters for peft."""
    if not args.lora:
        fp.save_pretrained(state, args.out, fn)
        return
    params = train.sharded(state)[0].full()
    if fp.is_main_rank():
        fn.module.load_state_dict({name: x for name, x in params.items() if "lora_" in name}, strict=False)
        fn.module.save_pretrained(args.out, save_embedding_layers=False)


def tokens(folder: str, data: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a text to train on, and of one held out: bytes, if the folder has no tokenizer."""
    texts = corpus.load(data, most=1_000_000)
    if not (Path(folder) / "tokenizer.json").exists():
        return texts
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = (tokenizer(bytes(text.tolist()).decode(errors="ignore"))["input_ids"] for text in texts)
    first, second = map(torch.tensor, found)
    return first, second


def small_llama(args: argparse.Namespace) -> str:
    """Write a small random Llama of bytes, as transformers does; every process its own, with equal values."""
    torch.manual_seed(args.seed)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.time + 1,
    )
    folder = tempfile.mkdtemp()
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal model; by default a small random Llama is made")
    parser.add_argument("--data", help="a text, or a folder of texts; by default Python's standard library")
    parser.add_argument("--mesh", default="data=2,tensor=2", help="axes and sizes, of data, tensor and pipe")
    parser.add_argument("--plan", help="plan as JSON; by default by the axes of the mesh")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank alone")
    parser.add_argument("--save", help="folder of checkpoints, on a disk that all hosts share")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--out", help="folder of the result, which must not exist")
    parser.add_argument("--steps", type=int, default=20, help="updates in all")
    parser.add_argument("--batch", type=int, default=8, help="sequences per update")
    parser.add_argument("--time", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--microbatches", type=int, default=2, help="microbatches of each rank's part of a batch")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the batches, and of the small model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
