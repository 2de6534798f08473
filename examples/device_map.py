"""Train an unmodified Hugging Face model on several devices, with its layers placed by a device map.

    python examples/device_map.py --devices 2 --share 0.7
    torchrun --nproc-per-node 3 examples/device_map.py --devices 3 --share 0.5

The map is computed on the meta device, from sizes: each device may hold a share of the model's bytes. The devices are
the stages of a pipeline. With one microbatch, one device runs at a time, as with `device_map="auto"` of transformers.
The losses are those of one device.
"""

from __future__ import annotations

import argparse

import torch
import transformers

import functional_parallel as fp
from sharding_specs import Mesh


def main() -> None:
    args = arguments()
    say = print if fp.is_main_rank() else (lambda *_: None)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=args.embed, n_layer=args.layers, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(config)
    whole = sum(parameter.nbytes for parameter in empty.parameters())
    limits = {device: int(args.share * whole) for device in range(args.devices)}
    found = fp.device_map(empty, limits)
    say(found)

    torch.manual_seed(args.seed)
    fn, params = fp.functional(transformers.GPT2LMHeadModel(config))

    def loss(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return fn(params, input_ids=tokens, labels=tokens, use_cache=False).loss

    plan = fp.pipeline("pipe", microbatches=args.microbatches, stages=found.stages)
    train = fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(pipe=len(found.devices)), plan)
    tokens = torch.randint(256, (args.batch, 32), generator=torch.Generator().manual_seed(args.seed))
    state = train.init(params, batch=tokens)
    for step in range(args.steps):
        state, metrics = train(state, tokens)
        say(f"step {step}: loss {metrics.loss:.4f}")
    for rank, memory in enumerate(train.program.memory().ranks):
        say(f"device {found.devices[rank]}: {memory.alive['parameters']:,} bytes of parameters, peak {memory.peak:,}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.7, help="bytes of a device, relative to the model's")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--embed", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
