"""Tokens per second of generation, in alternating pairs with `generate` of transformers. It writes docs/inference.md.

    python benchmarks/generation.py [--pairs 6] [--write]

Small models of 4 layers, 128 wide, with 4 rows, on one rank and one thread, greedy. The times are processor times. A
pair is one run of ours and one of each peer, in turns of order. A row shows medians, and the median of the ratios.
`device_map` is the same model under Accelerate's hooks (`dispatch_model`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import functional_parallel as fp
from sharding_specs import Mesh

PAGE = Path(__file__).parent.parent / "docs" / "inference.md"
BEGIN, END = "<!-- generation -->", "<!-- end of generation -->"
SHAPE: dict[str, Any] = {"vocab_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 128}
GROUPED: dict[str, Any] = {"num_key_value_heads": 4, "intermediate_size": 256, "max_position_embeddings": 256}
ROWS, PROMPT, NEW = 4, 16, 64

MODELS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **GROUPED)),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=512, n_layer=4, n_head=8, n_embd=128, n_positions=256)
    ),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE, **GROUPED)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="runs of each")
    parser.add_argument("--write", action="store_true", help="write the table into docs/inference.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(name, args.pairs) for name in MODELS]
    text = "\n".join(
        [
            "| model | here | transformers | device_map | here / transformers | here / device_map |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(text)
    if args.write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


def row(name: str, pairs: int) -> str:
    """Check that all write the same text, and measure them."""
    contestants = contestants_of(name)
    texts = {who: run() for who, run in contestants.items()}
    assert all(torch.equal(text, texts["here"]) for text in texts.values()), name
    times: dict[str, list[float]] = {who: [] for who in contestants}
    for pair in range(pairs):
        for who in list(contestants) if pair % 2 else reversed(list(contestants)):
            began = time.process_time()
            contestants[who]()
            times[who].append(time.process_time() - began)
    rates = [f"{ROWS * NEW / statistics.median(times[who]):,.0f}" for who in contestants]
    ratios = [
        f"{statistics.median(b / a for a, b in zip(times['here'], times[who], strict=True)):.2f}"
        for who in list(contestants)[1:]
    ]
    return f"| {' | '.join([name, *rates, *ratios])} |"


def contestants_of(name: str) -> dict[str, Callable[[], torch.Tensor]]:
    from accelerate import dispatch_model

    def made() -> Any:
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    model, plain = made(), made()
    spread = dispatch_model(made(), {"": "cpu"}, main_device="cpu", force_hooks=True)
    fn, params = fp.functional(model)
    tokens = torch.randint(3, 512, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    generator = fp.Generator(fn, Mesh(data=1), fp.data_parallel("data"))
    held = generator.hold(params, rows=ROWS, prompt=PROMPT, max_new_tokens=NEW)

    def theirs(peer: Any) -> torch.Tensor:
        mask = torch.ones_like(tokens)
        found: torch.Tensor = peer.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        return found[:, PROMPT:]

    return {
        "here": lambda: generator(held, tokens, max_new_tokens=NEW).tokens,
        "transformers": lambda: theirs(plain),
        "device_map": lambda: theirs(spread),
    }


if __name__ == "__main__":
    main()
