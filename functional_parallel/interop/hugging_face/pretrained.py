"""Parameters of a Hugging Face folder, read onto the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import optree
import torch

from sharding_specs import Box, Mesh, P

from ...checkpoint import LeafLayout, Piece, ReadItem, SavePlan, fill_shards, plan_restore
from ...errors import CheckpointError
from ...functions import as_local_function, functional
from ...ir import without_memory
from ...pipelines import pipeline_of
from ...runtime import Where, default_runtime, runtime_of
from ...stateful import Sharded, at_rest, filled, listed
from ...transforms import Plan, Transform
from .assembled import Assembled, Source
from .meta_model import initialise, meta_model
from .weight_names import read_names
from .weights_folder import WeightsFolder

Values = Mapping[str, Sequence[Assembled]]
Plans = Transform | Plan | Callable[[Any], Transform | Plan] | None


def load_pretrained(
    folder: str | Path,
    mesh: Mesh,
    plan: Plans = None,
    *,
    dtype: torch.dtype | None = None,
    model_class: Any = None,
    config: Mapping[str, Any] | None = None,
    new: str | Sequence[str] = (),
    unused: str | Sequence[str] = (),
    seed: int = 0,
    adapt: Callable[[Any], Any] | None = None,
) -> tuple[Callable[..., Any], Sharded]:
    """Read a Hugging Face folder of safetensors onto a mesh. Each rank reads the slices that it will hold.

    Returns `fn, params`, like `fp.functional` of the model. The model is made without values, from config.json. A tied
    weight is one parameter. Names are transformers' own: renamed and merged weights of the folder are converted.

    >>> import tempfile, torch, transformers, functional_parallel as fp
    >>> from sharding_specs import Mesh, rules
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    >>> folder = tempfile.mkdtemp()
    >>> transformers.LlamaForCausalLM(config).save_pretrained(folder)
    >>> mesh = Mesh(data=2, tensor=2)
    >>> plan = fp.chain(fp.tensor_parallel("tensor", rules.llama("tensor")), fp.zero(3, "data"))
    >>> fn, params = fp.load_pretrained(folder, mesh, plan)
    >>> def loss(params, **batch):
    ...     return fn(params, **batch, use_cache=False).loss
    >>> train = fp.train_step(loss, fp.optim.adamw(1e-4), mesh, plan)
    >>> tokens = torch.randint(0, 64, (4, 8))
    >>> state, metrics = train(train.init(params), input_ids=tokens, labels=tokens)
    >>> fp.save_pretrained(state, tempfile.mkdtemp(), fn)

    Args:
        folder: the folder, with config.json and `model.safetensors`, or several files and their index.
        mesh: the mesh.
        plan: the plan that gives the parameters their layout, or a function that returns it for the model, such as
            `lambda model: fp.tensor_parallel("tensor", rules_of(model))`. By default all are replicated. Under
            `fp.pipeline` each parameter is on one rank of its axis; `train.init(params, batch=batch)`, and
            `compiled.hold(params, …)`, move it to the ranks of the stages that use it.
        dtype: dtype of the parameters. Reads convert to it. By default the dtype in config.json.
        model_class: class of the model, or an Auto class of transformers. By default the class that config.json names.
        config: entries that replace entries of config.json, such as `{"num_labels": 1}`.
        new: patterns of names of weights that are drawn and not read, such as `"score*"` for a new head. The model
            draws them by its own initialisation, on each process in full, and equally on every mesh.
        unused: patterns of keys of the folder that the model does not have, such as `"lm_head*"`.
        seed: seed of the new weights.
        adapt: returns the module to use for the model without values, such as one with the adapters of peft. Parameters
            that it adds must have values.

    Returns:
        The function of the model, in the mode `eval` (`fn.module.train()` changes it), and its parameters. A function
        compiled with the same plan takes them, `train.init` takes them for any plan and mesh of the same processes,
        and `params.relayout(specs)` moves them.

    Raises:
        CheckpointError: if the folder has no such model: no config.json, pickles, code of its own (`auto_map`),
            quantized weights, an unknown model type, paths outside of the folder, or missing or unexpected weights or
            other shapes. The message lists them. If a pattern of `new` matches no weight, or the config of
            the model has no such entry.
        DamagedCheckpointError: if a file is cut or damaged.
        ModuleNotFoundError: without transformers 5.
    """
    path = Path(folder)
    with WeightsFolder(path) as files:
        found = files.tensors()
        model = meta_model(path, model_class, dtype, _stored(found), config or {})
        device = default_runtime(mesh).device or torch.get_default_device()
        values = read_names(model, found, str(path), *(_patterns(each) for each in (new, unused)))
        initialise(model, values, device, seed)
        return _read(files, model, values, mesh, plan, adapt, device)


def _patterns(given: str | Sequence[str]) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _stored(found: Mapping[str, Assembled]) -> torch.dtype:
    return next((x.dtype for x in found.values() if x.is_floating_point()), torch.get_default_dtype())


def _read(
    files: WeightsFolder,
    model: Any,
    values: Values,
    mesh: Mesh,
    plan: Plans,
    adapt: Callable[[Any], Any] | None,
    device: torch.device,
) -> tuple[Callable[..., Any], Sharded]:
    params = functional(model)[1]
    _read_constants(model, {name: value for name, value in values.items() if name not in params}, files, device)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    module = model if adapt is None else adapt(model)
    fn, shapes = functional(module)
    held = {name: names.get(id(x), "") for name, x in module.named_parameters() if name in shapes}
    new = {name: shapes[name] for name, old in held.items() if old not in values}
    empty = [name for name, x in new.items() if x.is_meta]
    if empty:
        told = "\n  ".join(listed(empty))
        raise ValueError(f"load_pretrained: adapt= made parameters that have no values:\n  {told}\nLet it fill them")
    assembled = {name: values[old] for name, old in held.items() if old in values}
    assembled |= {name: [Assembled.of_key(f"new {name}", x.shape, x.dtype)] for name, x in new.items()}
    made = {f"new {name}": x for name, x in new.items()}
    plan = plan if plan is None or isinstance(plan, (Plan, Transform)) else plan(module)
    f = as_local_function(fn if plan is None else plan(fn))
    resolved = f.resolve((shapes,), mesh)
    if resolved.stacks is not None:
        raise ValueError(
            "load_pretrained: a Hugging Face model has no stacks of layers: leave specs= of fp.pipeline out"
        )
    specs, where = optree.tree_map(at_rest, resolved.arguments[0]), _stages(shapes, mesh, f)
    known = [LeafLayout("params", name, tuple(x.shape), x.dtype, (Piece(P()),)) for name, x in shapes.items()]

    def source(key: str, box: Box, target: torch.Tensor) -> None:
        if key in made:
            target.copy_(made[key][box.slices])
        else:
            files.read(key, box, target)

    def fill(leaves: Sequence[LeafLayout], shards: dict[tuple[int, int], torch.Tensor]) -> None:
        items = plan_restore(SavePlan(Mesh(), tuple(known)), leaves, mesh)
        fill_shards(items, shards, partial(_read_into, source, assembled))

    like = optree.tree_map(without_memory, shapes)
    ranks = [where[name] for name in sorted(shapes)]
    return fn, filled(like, specs, partial(runtime_of, mesh, f), device, fill, ranks.__getitem__)


def _read_constants(model: Any, values: Values, files: WeightsFolder, device: torch.device) -> None:
    state = model.state_dict(keep_vars=True)
    for name, (value, *_) in values.items():
        full = value.full(files.read, state[name].dtype).to(device)
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        if own in module._buffers:
            module._buffers[own] = full
        else:
            module._parameters[own] = torch.nn.Parameter(full, state[name].requires_grad)


def _stages(shapes: Mapping[str, torch.Tensor], mesh: Mesh, f: Any) -> dict[str, Where]:
    """Return the ranks for each parameter: of a pipeline, one rank of its axis, by the bytes of earlier parameters."""
    request = pipeline_of(f.applied)
    if request is None:
        return dict.fromkeys(shapes, ())
    sizes = [x.numel() * x.element_size() for x in shapes.values()]
    count, total = mesh.axis_size(request.axis), max(sum(sizes), 1)
    middles = (end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True))
    return {
        name: ((request.axis, (min(int(middle * count / total), count - 1),)),)
        for name, middle in zip(shapes, middles, strict=True)
    }


def _read_into(
    source: Source, values: Values, items: Sequence[ReadItem], held: Callable[[int], torch.Tensor], rank: int
) -> None:
    for item in items:
        (value, *others), target = values[item.leaf.key], item.part.view(held(item.part.held))
        value.read(item.part.box, target, source)
        for other in others:
            again = torch.empty_like(target)
            other.read(item.part.box, again, source)
            if not torch.equal(again, target):
                names = " and ".join(sorted(value.keys | other.keys))
                raise CheckpointError(
                    f"load_pretrained: {item.leaf.key} is a tied weight, and {names} differ in the files: set "
                    "tie_word_embeddings to false in config.json"
                )
