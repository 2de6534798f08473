"""LoRA by peft on a Hugging Face Llama: from a folder to a folder, with a frozen base that is sharded too.

    python examples/lora_llama.py --mesh data=2,tensor=2
    torchrun --nproc-per-node 4 examples/lora_llama.py --mesh data=2,tensor=2

The base comes from `--base`, a folder that transformers wrote; by default a small random Llama is made. Padded lines of
text are accumulated in microbatches, and trained with tensor parallelism and ZeRO-3. Checkpoints have only the
adapters. Halfway the run begins again on `--resume-mesh`, as if other machines went on. At the end the adapters are
merged into the base, and transformers reads the exported folder.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import corpus
import peft
import torch
import transformers

import functional_parallel as fp
from sharding_specs import Mesh, rules

LENGTH, IGNORED = 48, -100  # tokens of a line, and the label of a token that does not count


def main() -> None:
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        base = args.base or make_base(Path(scratch) / "base")
        run(base, Mesh.parse(args.mesh), args, args.steps // 2)
        model, batch = run(base, Mesh.parse(args.resume_mesh or args.mesh), args, args.steps)
        export(model, args.out or f"{scratch}/merged", batch)


def run(base: str, mesh: Mesh, args: argparse.Namespace, steps: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Train to a number of steps, from the newest checkpoint if there is one. Return the trained model and a batch."""
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    model.requires_grad_(True)  # so that the base is among the parameters, and sharded; the optimizer freezes it
    fn, params = fp.functional(model)

    def loss(params: dict[str, torch.Tensor], **batch: torch.Tensor) -> torch.Tensor:
        return fn(params, **batch, use_cache=False).loss

    plan = [fp.accumulate(args.accumulate)]
    plan = [fp.zero(3, "data"), *plan] if "data" in mesh.axes else plan
    plan = [fp.tensor_parallel("tensor", rules.llama("tensor")), *plan] if "tensor" in mesh.axes else plan
    optimizer = fp.optim.by_path({"*lora_*": fp.optim.adamw(args.lr), "*": None})
    train = fp.train_step(loss, optimizer, mesh, fp.chain(*plan))
    state = train.restore(args.save, like=params) if Path(args.save).exists() else train.init(params)
    say = print if fp.is_main_rank() else (lambda *_: None)
    text, _ = corpus.load()
    while state.step < steps:
        state, metrics = train(state, **padded_lines(text, args.batch, state.step))
        say(f"{mesh}: step {state.step}, loss {metrics.loss:.6f}")
    train.save(state, args.save, only="trained")
    model.load_state_dict(train.params(state), strict=False)
    return model, padded_lines(text, args.batch, steps)


def padded_lines(text: torch.Tensor, count: int, step: int) -> dict[str, torch.Tensor]:
    """Return lines of text as bytes, padded to one length, with a mask, and labels that do not count the padding."""
    lines = [line[:LENGTH] for line in bytes(text[:100_000].tolist()).split(b"\n") if len(line) > 8]
    chosen = [torch.tensor(list(lines[(step * count + index) % len(lines)])) for index in range(count)]
    tokens = torch.stack([torch.nn.functional.pad(line, (0, LENGTH - len(line))) for line in chosen])
    mask = torch.stack([(torch.arange(LENGTH) < len(line)).long() for line in chosen])
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)}


def make_base(folder: Path) -> str:
    """Write a small random Llama of bytes, as transformers does."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def export(model: Any, folder: str, batch: dict[str, torch.Tensor]) -> None:
    """Merge the adapters into the base, write a folder, and compare what transformers reads from it."""
    if not fp.is_main_rank():
        return
    with torch.no_grad():
        trained = model.eval()(**batch).loss
        model.merge_and_unload().save_pretrained(folder)
        read = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(**batch).loss
    print(f"loss of the trained model {trained:.6f}, of the exported folder {read:.6f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="folder of a Llama; by default a small random one is made")
    parser.add_argument("--mesh", default="data=2,tensor=2", help="axes and sizes, of data and tensor")
    parser.add_argument("--resume-mesh", help="mesh of the second half; by default the same")
    parser.add_argument("--save", default="runs/lora", help="folder of checkpoints, on a disk that all hosts share")
    parser.add_argument("--out", help="folder of the merged model; by default a temporary one")
    parser.add_argument("--steps", type=int, default=20, help="updates in all")
    parser.add_argument("--batch", type=int, default=8, help="lines per update")
    parser.add_argument("--accumulate", type=int, default=2, help="microbatches per update")
    parser.add_argument("--rank", type=int, default=4, help="rank of the adapters")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
