"""Rows for scripts that run a model of transformers in parallel: transformers itself, OSLO and parallelformers."""

from __future__ import annotations

from typing import Any

import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, apply_rules, rules, shard

from .checks import close
from .names import Model
from .row import Row

__all__ = ["ROWS"]

HUB = "hub = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))"
IDS = torch.arange(32).reshape(4, 8)


def of_hub(plan: Any, mesh: Mesh) -> Any:
    """Compare the gradients of GPT-2 with those of one device; return the program."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    fn, params = fp.functional(GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)).eval())

    def loss(params: Any, ids: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = fn(params, input_ids=ids, labels=ids).loss
        return value

    step = fp.compile(fp.grad(plan(loss)), mesh)
    found, wanted = step(params, IDS), torch.func.grad(loss)(params, IDS)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in params)
    return step.lower(params, IDS)


def is_split(plan: Any) -> bool:
    return "all_gather" not in {each.kind for each in of_hub(plan, Mesh(tensor=2)).collectives()}


def is_split_thrice(plan: Any) -> bool:
    kinds = {(each.kind, *each.axes) for each in of_hub(plan, Mesh(pipe=2, data=2, tensor=2)).collectives()}
    return {("psum", "tensor"), ("send", "pipe")} <= kinds


def keeps_blocks(spec: P) -> bool:
    return bool(shard(torch.arange(8), spec, Mesh(tensor=2), 1).tolist() == [2, 3, 5, 7])


def takes_a_plan(found: Any) -> bool:
    model = Model()
    model._tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    params = dict(model.named_parameters())
    return bool(apply_rules(found, params) == apply_rules(rules.for_model(model), params))


IMPORT = "from transformers import GPT2Config, GPT2LMHeadModel\n" + HUB + "\n"
ROWS = [
    Row(
        'hub = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")',
        IMPORT + 'fp.tensor_parallel("tensor", rules.for_model(hub))',
        is_split,
        "The rules are those of `tp_plan`, and a table for families without one. It trains on any other plan too.",
    ),
    Row(
        "AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)",
        "from transformers import LlamaForSequenceClassification\n"
        "fn, params = fp.load_pretrained(\n"
        "    small_llama(), mesh, plan, model_class=LlamaForSequenceClassification,\n"
        '    config={"num_labels": 1}, new="score*", unused="lm_head*")\nparams.shapes["score.weight"].shape',
        lambda found: found == (1, 8),
        "Of a base model: the new head is named, and is the same on every mesh.",
    ),
    Row(
        'base_model_tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}',
        '{"layers/*/up/*": P("tensor"), "layers/*/down/weight": P(None, "tensor"), "*": P()}',
        takes_a_plan,
        "The first match wins. The collectives of activations follow.",
    ),
    Row(
        '"packed_colwise"',
        'P(((2, 1, 1), "tensor"))',
        keeps_blocks,
        "Blocks may be unequal: here queries, keys and values of grouped queries, each split by itself.",
    ),
    Row(
        "parallelize(hub, num_gpus=2)  # parallelformers",
        IMPORT + "fn, params = fp.functional(hub.eval())\n"
        'f = fp.tensor_parallel("tensor", rules.for_model(hub))(lambda params, ids: fn(params, input_ids=ids).logits)\n'
        "fp.compile(f, Mesh(tensor=2))(params, torch.arange(8)[None]) - hub(torch.arange(8)[None]).logits",
        lambda difference: close(difference, torch.zeros_like(difference)),
        "`python -m torch.distributed.run` starts the processes; without it one process has all ranks.",
    ),
    Row(
        "ParallelContext(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)  # OSLO\n"
        "TensorParallel(PipelineParallel(hub, parallel_context))\n"
        "ZeroRedundancyOptimizer(optimizer, parallel_context)",
        IMPORT + 'by_unit = fp.tensor_parallel("tensor", rules.for_model(hub))\n'
        'fp.chain(by_unit, fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2))',
        is_split_thrice,
        "On `Mesh(pipe=2, data=2, tensor=2)`. Stages are cut by cost.",
    ),
    Row(
        "hub.generate_batch(inputs=prompts)",
        "generator = fp.Generator(language_model, mesh, plan, cache=empty_cache)\n"
        "serving = fp.ContinuousBatch(generator, torch.eye(8), rows=2, length=8)\n"
        "serving.add([1, 2], max_new_tokens=3), serving.add([3], max_new_tokens=2)\n"
        "{number: text.tolist() for number, text in serving.run()}",
        lambda texts: texts == {0: [3, 6, 4], 1: [3, 6]},
        "Continuous batching: requests may be added at any time. A model of transformers needs no cache.",
    ),
    Row(
        'TrainingArguments(optim="adamw_bnb_8bit")',
        "fp.optim.quantised(fp.optim.adamw(1e-3), whole_below=0)",
        lambda optimizer: (
            optimizer.init(dict(Model().named_parameters())).mean["layers.0.up.weight"].integers.dtype == torch.int8
        ),
        "The moments of any optimizer, under any plan, in other codes than those of bitsandbytes. By default, those "
        "of parameters with fewer than 4096 elements keep their moments.",
    ),
]
