"""Models and plans whose staging `partition_time.py` measures.

The layers of a model come in three forms: a plain loop over equal dicts, the same loop with its block marked by
`fp.repeated`, and an `nn.ModuleList`, as Hugging Face's Llama has. Models are on the meta device at the full width of
GPT-3, or small and on the CPU, if they are to run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from optional import missing

import functional_parallel as fp
from sharding_specs import Mesh, rules, split

sys.path.append(str(Path(__file__).parent.parent / "examples"))  # behind those of the checkout that is measured

import gpt

__all__ = ["MODELS", "PLANS", "Case", "Model", "model_of"]

MODELS = ("loop", "marked", "modules")
SAMPLES = 16


@dataclass(frozen=True)
class Model:
    loss: Callable[..., torch.Tensor]
    params: Any
    specs: Any  # of tensor parallelism over the axis "tensor"
    batch: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plan:
    mesh: Mesh
    transform: Callable[[Any], Any]  # of the specs of tensor parallelism
    is_step: bool = True  # whether it is a training step, with AdamW and clipping; otherwise gradient and value


def _tensor(specs: Any) -> Any:
    return fp.tensor_parallel("tensor", specs)


_SQUARE = Mesh(data=2, tensor=2)
PLANS = {
    "data": Plan(Mesh(data=2), lambda specs: fp.data_parallel("data"), is_step=False),
    "tensor": Plan(Mesh(tensor=2), _tensor, is_step=False),
    "tensor, zero 3": Plan(_SQUARE, lambda specs: fp.chain(_tensor(specs), fp.zero(3, "data")), is_step=False),
    "step": Plan(_SQUARE, lambda specs: fp.chain(_tensor(specs), fp.zero(3, "data"))),
    "step, bf16, remat": Plan(
        _SQUARE,
        lambda specs: fp.chain(fp.mixed_precision("bf16"), fp.remat(), _tensor(specs), fp.zero(3, "data")),
    ),
    "zero 2, accumulate": Plan(Mesh(data=2), lambda specs: fp.chain(fp.zero(2, "data"), fp.accumulate(2))),
    "pipeline": Plan(
        Mesh(pipe=8, data=2),
        lambda specs: fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", schedule="1f1b", microbatches=8)),
    ),
    "interleaved, tensor": Plan(
        Mesh(pipe=4, tensor=2),
        lambda specs: fp.chain(_tensor(specs), fp.pipeline("pipe", schedule="interleaved", microbatches=8)),
    ),
}


class Case:
    """A model of some layers under a plan."""

    def __init__(self, model: Model, plan: Plan) -> None:
        self.model = model
        transform = plan.transform(model.specs)
        self.step: Any = (
            fp.train_step(model.loss, fp.optim.adamw(1e-4), plan.mesh, transform, clip=1.0)
            if plan.is_step
            else fp.compile(fp.grad_and_value(transform(model.loss)), plan.mesh)
        )
        self.state = model.params

    def lower(self) -> Any:
        return self.step.lower(self.state, **self.model.batch)

    def begin(self) -> None:
        """Shard the state of a training step, so that it can run."""
        self.state = self.step.init(self.model.params)

    def run(self) -> None:
        self.state, metrics = self.step(self.state, **self.model.batch)
        metrics.loss.item()


def model_of(name: str, layers: int, *, small: bool = False) -> Model:
    """Return a model by the form of its layers.

    Raises:
        SystemExit: if the form needs transformers, which is not there.
    """
    with torch.device("cpu" if small else "meta"):
        return _llama(layers, small) if name == "modules" else _gpt(layers, small, name == "marked")


def _gpt(layers: int, small: bool, is_marked: bool) -> Model:
    """GPT-3 with its vocabulary of 50257 rounded up to a multiple of 128, so that a tensor axis divides it."""
    wide = {"embed": 12288, "heads": 96, "time": 2048, "vocab": 128 * math.ceil(50257 / 128)}
    config = gpt.Config(layers, **({"embed": 64, "heads": 4, "time": 16, "vocab": 64} if small else wide))
    params, specs = split(gpt.init(config))

    def layer(params: Any, x: torch.Tensor) -> torch.Tensor:
        x = gpt.residual(x, gpt.attention(params, gpt.norm(x, params["norm1"])), config)
        return gpt.residual(x, gpt.mlp(params, gpt.norm(x, params["norm2"])), config)

    block = fp.repeated(layer) if is_marked and hasattr(fp, "repeated") else layer  # an older checkout has no mark

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens[:, :-1], params["tokens"])
        for each in params["blocks"]:
            x = block(each, x)
        scores = einsum(gpt.norm(x, params["norm"]), params["head"], "b t e, e v -> b t v")
        return F.cross_entropy(rearrange(scores, "b t v -> (b t) v"), rearrange(tokens[:, 1:], "b t -> (b t)"))

    return Model(loss, params, specs, {"tokens": torch.zeros(SAMPLES, config.time + 1, dtype=torch.int64)})


def _llama(layers: int, small: bool) -> Model:
    """Hugging Face's Llama, from a configuration with a small vocabulary."""
    if why := missing("Llama"):
        raise SystemExit(why)
    import transformers

    width, time = (64, 16) if small else (4096, 2048)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if small else 32,
        num_key_value_heads=2 if small else 8,
        max_position_embeddings=time,
        use_cache=False,
    )
    fn, params = fp.functional(transformers.LlamaForCausalLM(config))
    tokens = torch.zeros(SAMPLES, time, dtype=torch.int64)

    def loss(params: Any, **batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = fn(params, **batch).loss
        return result

    return Model(loss, params, rules.llama("tensor"), {"input_ids": tokens, "labels": tokens})
