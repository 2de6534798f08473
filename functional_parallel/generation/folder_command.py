"""The command `generate`: text from a Hugging Face folder, on a mesh."""

from __future__ import annotations

import argparse
from typing import Any

from sharding_specs import Mesh, rules

from ..interop import load_pretrained
from ..runtime import is_main_rank
from ..transforms import chain, data_parallel, pipeline, tensor_parallel
from .generate import generate


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("folder", metavar="FOLDER", help="safetensors, config.json and a tokenizer")
    parser.add_argument("--mesh", default="data=1", help="axes and sizes, of data, tensor and pipe")
    parser.add_argument("--prompt", action="append", required=True, help="text to continue; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the best token")
    parser.add_argument("--top-k", type=int, help="draw from this number of best tokens")
    parser.add_argument("--top-p", type=float, help="draw from the best tokens with this probability")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws")


def run(chosen: argparse.Namespace) -> str:
    """Return the prompts with their text, on the first rank."""
    from transformers import AutoTokenizer

    mesh, tokenizer = Mesh.parse(chosen.mesh), AutoTokenizer.from_pretrained(chosen.folder)

    def plan(model: Any) -> Any:
        sharded = [tensor_parallel("tensor", rules.for_model(model, mesh=mesh))] if "tensor" in mesh.axis_names else []
        split = [data_parallel("data")] if "data" in mesh.axis_names else []
        cut = [pipeline("pipe", microbatches=1, balance="layers")] if "pipe" in mesh.axis_names else []
        return chain(*sharded, *split, *cut)

    fn, params = load_pretrained(chosen.folder, mesh, plan)
    found = generate(
        fn,
        params,
        [tokenizer(prompt)["input_ids"] for prompt in chosen.prompt],
        mesh,
        plan(fn.module),  # type: ignore[attr-defined]
        max_new_tokens=chosen.max_new_tokens,
        seed=chosen.seed,
        temperature=chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
    )
    texts = (tokenizer.decode(row, skip_special_tokens=True) for row in found.rows())
    lines = [prompt + text for prompt, text in zip(chosen.prompt, texts, strict=True)]
    return "\n".join(lines) if is_main_rank() else ""
