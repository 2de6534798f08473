"""Rows for scripts with `accelerate.Accelerator`."""

from __future__ import annotations

from typing import Any

import torch

import functional_parallel as fp
from sharding_specs import Mesh

from .checks import close, counts, first_loss, in_precision, same_loop, trained, trains
from .names import Model, fn, params, x, y
from .row import Row

__all__ = ["ROWS", "left"]


def left() -> dict[str, Any]:
    """Names of the left sides. Accelerate does not have to be installed for the rest of this module."""
    import accelerate

    plain = (
        "Accelerator",
        "init_empty_weights",
        "infer_auto_device_map",
        "dispatch_model",
        "load_checkpoint_and_dispatch",
    )
    names = {name: getattr(accelerate, name) for name in plain}
    plugins = ("DeepSpeedPlugin", "FullyShardedDataParallelPlugin", "DataLoaderConfiguration")
    names |= {name: getattr(accelerate.utils, name) for name in plugins}
    return {
        **names,
        "accelerator": accelerate.Accelerator,
        "Model": Model,
        "ParallelismConfig": accelerate.ParallelismConfig,
        "print": print,
    }


def same_values(predict: Any) -> bool:
    return close(predict(x), fn(params, x))


def one_value_per_sample(found: Any) -> bool:
    errors, present = found
    return close(errors[present], (fn(params, x[:5]) - y[:5]).square().mean(1))


def clamps(optimizer: fp.optim.Optimizer) -> bool:
    gradients = {"w": torch.tensor([3.0, -3.0, 0.1])}
    new, _ = optimizer.update(gradients, optimizer.init(gradients), {"w": torch.zeros(3)})
    return close(new["w"], -0.1 * torch.tensor([0.5, -0.5, 0.1]))


def is_on_its_ranks(params: Any) -> bool:
    return isinstance(params, fp.Sharded) and sorted(params.full()) == sorted(params.shapes)


def accumulated(step: Any) -> bool:
    return first_loss(step(x, y)) and step.train.program.counts() == trained(fp.data_parallel("data")).program.counts()


def counted_on(found: Any) -> bool:
    """Each token is the sum of all before it, modulo 8."""
    return bool(found.tokens.tolist() == [[3, 6, 4, 0], [3, 6, 4, 0]])


ROWS = [
    Row(
        "accelerator = Accelerator()\n"
        "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)",
        "step = fp.prepare(module, optimizer, scheduler, loss=loss_of)\nstep(x, y)",
        first_loss,
        "The loader does not change; see the rows on batches.",
    ),
    Row(
        "accelerator.backward(loss)\noptimizer.step()\nscheduler.step()\noptimizer.zero_grad()",
        "step(x, y)",
        first_loss,
    ),
    Row(
        "accelerator = Accelerator(gradient_accumulation_steps=4)\naccelerator.accumulate(model)",
        "chained = fp.chain(plan, fp.accumulate(4))\n"
        "fp.prepare(module, optimizer, loss=loss_of, mesh=mesh, plan=chained)",
        accumulated,
        "A step takes the batch of all microbatches: multiply the batch size of the loader by 4.",
    ),
    Row(
        "accelerator.no_sync(model)",
        "fp.chain(plan, fp.accumulate(4))",
        lambda plan: counts(plan) == counts(fp.data_parallel("data")),
    ),
    Row(
        "accelerator.clip_grad_norm_(model.parameters(), 0.1)",
        "fp.prepare(module, optimizer, loss=loss_of, mesh=mesh, plan=plan, clip=0.1).train",
        lambda train: same_loop(train, clip=0.1),
        "`step.metrics.grad_norm` is the norm before clipping.",
    ),
    Row(
        "accelerator.clip_grad_value_(model.parameters(), 0.5)",
        "fp.optim.clip_value(fp.optim.sgd(0.1), 0.5)",
        clamps,
    ),
    Row(
        'Accelerator(mixed_precision="bf16")\naccelerator.autocast()',
        'fp.chain(fp.mixed_precision("bf16"), plan)',
        in_precision("bf16"),
    ),
    Row(
        'Accelerator(mixed_precision="fp16")',
        'fp.chain(fp.mixed_precision("fp16"), plan)',
        in_precision("f16"),
        "The loss scale is part of the optimizer state.",
    ),
    Row('Accelerator(mixed_precision="fp8")', limit="FP8"),
    Row(
        "Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))",
        'fp.zero(2, "data")',
        trains(kinds="psum psum_scatter all_gather"),
    ),
    Row(
        "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))",
        'fp.zero(3, "data")',
        trains(kinds="psum psum_scatter all_gather"),
    ),
    Row(
        "Accelerator(parallelism_config=ParallelismConfig(tp_size=2, dp_shard_size=2))",
        'rules = {"*up.*": P("tensor"), "*down.weight": P(None, "tensor"), "*": P()}\n'
        'fp.chain(fp.tensor_parallel("tensor", rules), fp.zero(3, "data"))',
        trains(Mesh(data=2, tensor=2)),
        "On `Mesh(data=2, tensor=2)`.",
    ),
    Row(
        "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))",
        'fp.train_step(loss, adamw, mesh, plan, batch="global")',
        same_loop,
        "The default: every rank passes the global batch, and a step slices it.",
    ),
    Row(
        "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=False))",
        'fp.train_step(loss, adamw, mesh, plan, batch="own")',
        same_loop,
        "Every process passes the batch of its loader.",
    ),
    Row(
        "accelerator.join_uneven_inputs([model])",
        "list(fp.even_batches([(x, y)], 8, mesh))",
        lambda found: [present.tolist() for _, present in found] == [[True] * 8],
        "The loss gets a mask of the real samples.",
    ),
    Row(
        "accelerator.gather(outputs)",
        "step.eval(lambda model, x: model(x))",
        same_values,
        "Results are full tensors on every rank.",
    ),
    Row(
        "accelerator.gather_for_metrics(outputs)",
        "errors = step.eval(lambda model, x, y: (model(x) - y).square().mean(1))\n"
        "batch, present = fp.pad_batch((x[:5], y[:5]), 8)\n"
        "errors(*batch), present",
        one_value_per_sample,
        "`present` selects the samples that are not padding: `errors[present]`.",
    ),
    Row(
        "accelerator.pad_across_processes(labels, dim=1, pad_index=-100)",
        'fp.pad_to({"labels": torch.ones(2, 3)}, [4, 8], mesh=mesh)',
        lambda found: found[0]["labels"][:, 3].tolist() == [-100, -100],
        "Ranks pad to the smallest of the given lengths that holds the longest batch, so steps have few programs.",
    ),
    Row(
        'accelerator.reduce(loss, reduction="mean")',
        "step(x, y)",
        first_loss,
        "The value is the mean over the global batch.",
    ),
    Row(
        "accelerator.unwrap_model(model)",
        "step.module()",
        lambda module: sorted(dict(module.named_parameters())) == sorted(params),
        "Writes the current parameters into the module, on every process.",
    ),
    Row(
        'accelerator.save_state("folder")\naccelerator.load_state("folder")',
        "step.train.save(step.state, folder)\nstep.state = step.train.restore(folder)\nstep(x, y)",
        first_loss,
        "Every process calls both. Any mesh and plan can restore it.",
    ),
    Row(
        'accelerator.is_main_process\naccelerator.print("text")',
        "fp.is_main_rank()",
        lambda found: found is True,
    ),
    Row("accelerator.process_index", "fp.rank()", lambda found: found == 0),
    Row(
        "with init_empty_weights(): module = Model()",
        'with torch.device("meta"): fn, _ = fp.functional(Model())\n'
        "state = train.init(lambda: fp.functional(Model())[1])\ntrain(state, x, y)",
        lambda found: found[0].step == 1,
    ),
    Row(
        'infer_auto_device_map(module, {0: "1KB", "cpu": "1MB"})',
        'fp.device_map(module, {"device": "1kB", "host": "1MB"})',
        lambda found: found.by_path == {"*": "device"},
        "Memories have limits; the free memory of this machine is not asked. See [device maps](device_maps.md).",
    ),
    Row(
        'dispatch_model(module, {"layers.0": 0, "layers.1": "cpu"})',
        'found = fp.device_map(module, {"layers/0": "device", "layers/1": "host"})\n'
        'fp.chain(fp.data_parallel("data"), fp.offload(state="device", parameters=found))',
        lambda plan: trained(plan).program.memory().peaks["host"] > 0,
        "Training too. Devices with numbers are stages: `found.stages` is for `stages=` of `fp.pipeline`.",
    ),
    Row(
        'load_checkpoint_and_dispatch(module, "folder", device_map="auto")',
        "fn, params = fp.load_pretrained(small_llama(), mesh, plan)\nparams",
        is_on_its_ranks,
        "Of a Hugging Face folder: each rank reads its slices. `train.init(params)` goes on from them.",
    ),
    Row(
        'accelerator.save_model(model, "folder")',
        "fn, params = fp.load_pretrained(small_llama(), mesh, plan)\n"
        'fp.save_pretrained(params, f"{folder}/new", fn)\nfp.load_pretrained(f"{folder}/new", mesh, plan)[1]',
        is_on_its_ranks,
        "Also of a training state, for `from_pretrained`. Each rank writes its share of the files.",
    ),
    Row(
        "accelerator.unwrap_model(model).generate(tokens, max_new_tokens=4)",
        "fp.generate(language_model, torch.eye(8), [[1, 2], [3]], mesh, plan, cache=empty_cache, max_new_tokens=4)",
        counted_on,
        "A model of transformers needs no cache: see [Inference](inference.md).",
    ),
]
