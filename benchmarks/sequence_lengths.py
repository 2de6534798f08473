"""How long each sequence length of one model takes from function to program.

    python benchmarks/sequence_lengths.py --write

One training step (AdamW, clipping) on data=2, tensor=2 with Megatron's specs and ZeRO-3 is lowered for ten lengths in
turn, as batches that are padded to their longest sequence have them. The models are narrow, because the time does not
depend on the width, and 32 layers deep:

    Llama     of Hugging Face, from a configuration, with its attention mask and labels
    GPT       of examples/gpt.py, a loop over dicts of parameters

Seconds are processor time of one thread. Nothing is computed: batches are shapes without storage.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt

import functional_parallel as fp
from sharding_specs import Mesh, rules, split

HEAD = ("model", "length", "seconds")
LENGTHS = (384, 160, 352, 216, 304, 280, 192, 336, 248, 368)
ROWS, VOCAB = 64, 512
MESH = Mesh(data=2, tensor=2)

Staging = tuple[Callable[[], Any], Any, Callable[[int], dict[str, torch.Tensor]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in args.model for row in measured(name, args.layers, args.lengths)]
    table = report.table(HEAD, rows)
    print(table)
    if args.write:
        report.write("sequence lengths", table)


def measured(name: str, layers: int, lengths: Sequence[int]) -> list[tuple[object, ...]]:
    make, params, batch = MODELS[name](layers)
    train, rows = make(), list[tuple[object, ...]]()
    for length in lengths:
        began = time.process_time()
        train.lower(params, **batch(length))
        rows.append((name, length, f"{time.process_time() - began:.2f}"))
    return rows


def llama(layers: int) -> Staging:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    fn, params = fp.functional(transformers.LlamaForCausalLM(config))

    def loss(params: dict[str, torch.Tensor], **batch: torch.Tensor) -> torch.Tensor:
        return fn(params, **batch, use_cache=False).loss  # type: ignore[no-any-return]

    def batch(length: int) -> dict[str, torch.Tensor]:
        names = ("input_ids", "attention_mask", "labels")
        return {name: torch.empty(ROWS, length, dtype=torch.int64, device="meta") for name in names}

    return step(loss, rules.llama("tensor")), params, batch


def small_gpt(layers: int) -> Staging:
    config = gpt.Config(layers=layers, embed=64, heads=4, time=1024, vocab=VOCAB)
    params, specs = split(gpt.init(config))

    def batch(length: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.empty(ROWS, length + 1, dtype=torch.int64, device="meta")}

    return step(partial(gpt.loss, config=config), specs), params, batch


def step(loss: Callable[..., torch.Tensor], specs: Any) -> Callable[[], Any]:
    plan = fp.chain(fp.tensor_parallel("tensor", specs), fp.zero(3, "data"))
    return lambda: fp.train_step(loss, fp.optim.adamw(1e-4), MESH, plan, clip=1.0)


MODELS: dict[str, Callable[[int], Staging]] = {"Llama": llama, "GPT": small_gpt}

if __name__ == "__main__":
    main()
