"""Programs for CUDA are lowered without it, and no op of them has operands on two devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_parallel as fp
from functional_parallel import optim
from functional_parallel.errors import TracingError
from functional_parallel.ir import info, operands_of
from functional_parallel.program import Program
from functional_parallel.schedules import FAMILIES
from functional_parallel.tracing.devices import devices_of
from functional_parallel.training import replicas
from functional_parallel.training.update import flat
from sharding_specs import Mesh, P

WIDTH, LAYERS, VOCABULARY = 8, 2, 12
SPECS = {
    "embed": P("tensor"),
    "layers": [{"qkv": P("tensor"), "out": P(None, "tensor"), "norm": P(), "bias": P()}] * LAYERS,
    "head": P("tensor"),
}


def params() -> Any:
    layer = {
        "qkv": torch.zeros(2, 3, WIDTH // 2, WIDTH),
        "out": torch.zeros(WIDTH, 2, WIDTH // 2),
        "norm": torch.ones(WIDTH),
        "bias": torch.zeros(WIDTH),
    }
    return {
        "embed": torch.zeros(VOCABULARY, WIDTH),
        "layers": [dict(layer) for _ in range(LAYERS)],
        "head": torch.zeros(VOCABULARY, WIDTH),
    }


TOKENS = torch.zeros(8, 5, dtype=torch.int64)


def block(layer: Any, x: Tensor) -> Tensor:
    y = F.layer_norm(x, (WIDTH,), layer["norm"], layer["bias"])
    q, k, v = torch.einsum("btd,hced->cbhte", y, layer["qkv"])
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + torch.einsum("bhte,dhe->btd", y, layer["out"])


def logits(params: Any, tokens: Tensor) -> Tensor:
    x = F.embedding(tokens, params["embed"])
    x = x + torch.arange(tokens.shape[1], device=x.device).unsqueeze(-1) / WIDTH
    for layer in params["layers"]:
        x = block(layer, x)
    return x @ params["head"].T


def loss(params: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits(params, tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def with_draws(params: Any, tokens: Tensor) -> Tensor:
    x = F.dropout(logits(params, tokens[:, :-1]), 0.1)
    x = fp.random.dropout(x, 0.1) + torch.rand_like(x) + torch.randn(x.shape[-1], device=x.device)
    return x.square().mean() * torch.randint(1, 3, (), device="cuda")


def with_literals(params: Any, tokens: Tensor) -> Tensor:
    found = logits(params, tokens[:, :-1])
    assert found.is_cuda and found.device.type == "cuda"
    weights = torch.tensor([1.0] * VOCABULARY, device="cuda") + torch.ones(VOCABULARY).cuda()
    with torch.device("cuda"):
        weights = weights * torch.arange(VOCABULARY)
    weights = weights + torch.as_tensor([2.0], device=found.device) + found.new_tensor(3.0) + torch.ones(1).to("cuda:0")
    return (found * weights.to(found.device, found.dtype)).mean()


SMALL = [{"w": torch.zeros(4, 4), "bias": torch.zeros(4)}] * 4  # for what does not depend on the model


def small(params: Any, x: Tensor) -> Tensor:
    for layer in params:
        if "w" not in layer:
            continue
        x = F.dropout(torch.tanh(x @ layer["w"] + layer["bias"]), 0.1)
    return x.square().mean() * torch.rand((), device=x.device)


ADAMW, DATA = optim.adamw(1e-3), Mesh(data=2)
OPTIMIZERS = {
    "sgd": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optim.adam(optim.schedules.cosine(1e-3, 10, warmup=2)),
    "adagrad": optim.adagrad(1e-2, lr_decay=0.1),
    "lion": optim.lion(1e-3),
    "lamb": optim.lamb(1e-3),
    "adafactor": optim.adafactor(1e-3),
    "muon by path": optim.by_path({"*/w": optim.muon(1e-3), "*": ADAMW}),
    "chain": optim.chain(optim.scale_by_adam(), optim.scale_by_learning_rate(lambda step: 1e-3 / (1 + step))),
    "clipped values": optim.clip_value(ADAMW, 0.1),
    "rate on the host": optim.adamw(lambda step: 1e-3 if step.item() < 3 else 1e-4),
}
Row = tuple[Callable[..., Any], Mesh, Any, Any, dict[str, Any]]
STEPS: dict[str, Row] = {
    "no plan": (loss, Mesh(), None, ADAMW, {"clip": 1.0}),
    "data": (loss, DATA, fp.data_parallel("data"), ADAMW, {"clip": 1.0}),
    "master": (loss, DATA, fp.data_parallel("data", master=0), ADAMW, {}),
    **{f"zero {stage}": (loss, DATA, fp.zero(stage, "data"), ADAMW, {"clip": 1.0}) for stage in range(4)},
    "zero of 3 ranks": (loss, Mesh(data=3), fp.zero(3, "data", batch=P()), ADAMW, {}),
    "flat": (loss, DATA, fp.zero(2, "data", layout="flat"), ADAMW, {"clip": 1.0}),
    "flat with an untrained leaf": (small, DATA, fp.zero(1, "data", layout="flat"), ADAMW, {"seed": 0}),
    "tensor": (loss, Mesh(tensor=2), fp.tensor_parallel("tensor", SPECS), ADAMW, {"clip": 1.0}),
    "accumulate": (loss, Mesh(), fp.accumulate(2), ADAMW, {}),
    **{f"remat {how}": (loss, Mesh(), fp.remat(how), ADAMW, {}) for how in ("layers", "attention", "nothing")},
    "remat budget": (loss, DATA, fp.chain(fp.remat(budget="22KiB"), fp.zero(1, "data")), ADAMW, {}),
    "bf16": (loss, DATA, fp.chain(fp.mixed_precision("bf16"), fp.zero(3, "data")), ADAMW, {}),
    "fp16": (loss, DATA, fp.chain(fp.mixed_precision("fp16"), fp.zero(1, "data")), ADAMW, {}),
    "fp16 flat": (loss, DATA, fp.chain(fp.mixed_precision("fp16"), fp.zero(1, "data", layout="flat")), ADAMW, {}),
    "local SGD": (loss, DATA, fp.local_sgd("data", inner=2), ADAMW, {}),
    "DiLoCo": (loss, DATA, fp.diloco("data", inner=2), ADAMW, {}),
    "local SGD with draws": (with_draws, DATA, fp.local_sgd("data", inner=2), ADAMW, {"seed": 0}),
    "draws": (with_draws, DATA, fp.zero(3, "data"), ADAMW, {"seed": 0}),
    "draws in microbatches": (with_draws, DATA, fp.chain(fp.zero(1, "data"), fp.accumulate(2)), ADAMW, {"seed": 0}),
    "literals": (with_literals, DATA, fp.zero(2, "data"), ADAMW, {}),
    "all": (
        with_draws,
        Mesh(pipe=2, data=2, tensor=2),
        fp.chain(
            *(fp.mixed_precision("bf16"), fp.remat("layers"), fp.tensor_parallel("tensor", SPECS)),
            *(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2)),
        ),
        ADAMW,
        {"clip": 1.0, "seed": 0},
    ),
}


def programs_of(lowered: Any) -> list[Program]:
    return [lowered] if isinstance(lowered, Program) else list(lowered.every_program())


def mixed(program: Program) -> Iterator[str]:
    """Describe the ops with operands on two devices, and the tensors on other devices than CUDA."""
    for node in program.traced.graph.nodes:
        operands = [value for operand in operands_of(node) for value in info(operand).results if value is not None]
        if len(devices_of(operands)) > 1:
            yield f"{info(node).source}: {node.target} takes {', '.join(f'{x} on {x.device}' for x in operands)}"
        if node.op != "output" and not all(user.target is torch.ops.aten._to_copy.default for user in node.users):
            yield from (f"{node.target}: {x} on {x.device}" for x in info(node).results if x and _is_elsewhere(x))
        named = node.kwargs.get("device")
        if named is not None and named.type not in ("cuda", "cpu"):
            yield f"{node.target} names {named}"


def _is_elsewhere(x: Any) -> bool:
    return x.device != torch.device("cuda", 0) and x.numel > 1


def check(lowered: Any) -> None:
    found = [line for program in programs_of(lowered) for line in mixed(program)]
    assert not found, "\n".join(found)
    assert lowered.memory() and lowered.price() and lowered.explain()


def check_step(lowered: Any) -> None:
    check(lowered)
    assert not [str(each) for each in lowered.host_ops() if each.waits]  # nothing synchronizes the host


def lower_step(f: Any, mesh: Mesh, plan: Any, optimizer: Any, options: dict[str, Any]) -> Any:
    unused = [{"unused": torch.zeros(3)}] if "flat" in repr(plan) else []
    args = (SMALL + unused, torch.zeros(8, 4)) if f is small else (params(), TOKENS)
    return fp.train_step(f, optimizer, mesh, plan, **options).lower(*fp.abstract(args, "cuda"))


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore::functional_parallel.NotTrainedWarning")
def test_steps(name: str) -> None:
    check_step(lower_step(*STEPS[name]))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_pipelines(name: str) -> None:
    plan = fp.pipeline("pipe", schedule=name, microbatches=4)
    check_step(lower_step(small, Mesh(pipe=2), plan, ADAMW, {"seed": 0}))


@pytest.mark.parametrize("plan", [fp.zero(2, "data"), fp.data_parallel("data")], ids=["zero", "replicated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.every(2)
def test_optimizers(name: str, plan: Any) -> None:
    check_step(lower_step(small, DATA, plan, OPTIMIZERS[name], {"clip": 1.0, "seed": 0}))


# --- Functions: inference, derivatives, modules with buffers, the library's own ops ---


def ctc(w: Tensor, x: Tensor) -> Tensor:
    scores = (x @ w).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
    targets = torch.ones(x.shape[0], 1, dtype=torch.int64, device=x.device)
    return F.ctc_loss(scores, targets, lengths, torch.ones_like(lengths))


def grouped(w: Tensor, x: Tensor) -> Tensor:
    ends = torch.full((2,), 4, dtype=torch.int32, device=x.device).cumsum(0).to(torch.int32)
    return F.grouped_mm(x.flatten(0, 1).bfloat16(), torch.stack([w, w]).bfloat16(), offs=ends).float().mean()


def normed() -> tuple[Any, Any]:
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.Dropout(0.1))
    run, params, buffers = fp.functional(model, buffers=True)

    def f(params: Any, buffers: Any, x: Tensor) -> Any:
        with fp.random.using(fp.random.key(0)):
            y, new = run(params, buffers, x)
        return y.square().mean(), new

    return fp.grad(fp.data_parallel("data", batch=(P(), P("data")))(f), has_aux=True), (params, buffers, X)


def picked(w: Tensor, x: Tensor) -> Tensor:
    """Lookups and masks, whose rules make tensors of positions."""
    index = torch.arange(x.shape[0] * 2, device=x.device).reshape(-1, 2) % 4
    y = F.embedding(index, w) + F.one_hot(index, 4).float() @ w + w[index] + x[:, :, 0].gather(1, index).unsqueeze(-1)
    mask = torch.ones(4, 4, dtype=torch.bool, device=x.device).tril()
    z = F.scaled_dot_product_attention(x, x, x, attn_mask=mask[: x.shape[1], : x.shape[1]])
    losses = F.nll_loss(y.flatten(0, 1).log_softmax(-1), index.flatten(), ignore_index=3)
    return losses + z.masked_fill(z > 0, 0.0).cumsum(0).mean() + F.pad(x, (1, 1)).roll(1, 0).topk(2).values.sum()


W, X = torch.zeros(4, 4), torch.zeros(8, 4, 4)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "inference": (fp.tensor_parallel("data", P("data"))(lambda w, x: x @ w), (W, X)),
    "hessian": (fp.hessian(fp.data_parallel("data")(lambda w, x: (x @ w).tanh().mean())), (W, X)),
    "ctc": (fp.grad(fp.zero(3, "data")(ctc)), (W, X)),
    "grouped": (fp.grad(fp.data_parallel("data", batch=P())(grouped)), (W, X)),
    "lookups": (fp.grad(fp.zero(3, "data")(picked)), (W, X)),
    "lookups, split": (fp.grad(fp.tensor_parallel("data", P("data"))(picked)), (W, X)),
    "norms": normed(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    f, args = FUNCTIONS[name]
    check(fp.compile(f, DATA).lower(*fp.abstract(args, "cuda")))


COLLECTIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "psum": lambda x: fp.psum(x, "data"),
    "pmean": lambda x: fp.pmean(x, "data"),
    "pmax": lambda x: fp.pmax(x, "data"),
    "psum_scatter": lambda x: fp.all_gather(fp.psum_scatter(x, "data"), "data", to="invariant"),
    "all_to_all": lambda x: fp.psum(fp.all_to_all(x, "data", 0, 0), "data"),
    "ppermute": lambda x: fp.psum(fp.ppermute(x, "data", [(0, 1), (1, 0)]), "data"),
    "pbroadcast": lambda x: fp.pbroadcast(x, "data", 1),
    "axis_index": lambda x: fp.psum(x * fp.axis_index("data"), "data"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name: str) -> None:
    body = fp.shard_map(COLLECTIVES[name], DATA, P("data"), P())
    check(body.lower(fp.abstract(torch.zeros(8, 2))))


# --- What is refused ---


def test_a_defect_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of the host in a step of CUDA, as they were once, do not pass."""

    def in_main_memory(_: Any, value: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(value, dtype=dtype)

    monkeypatch.setattr(replicas, "scalar_beside", in_main_memory)
    with pytest.raises(TracingError, match=r"operands of .* are on two devices: .* is on cpu, .* is on cuda:0"):
        check(lower_step(*STEPS["local SGD"]))
    monkeypatch.undo()
    monkeypatch.setattr(flat, "_mask", partial(_mask_in_main_memory, flat._mask))
    with pytest.raises(TracingError, match="on two devices"), pytest.warns(fp.NotTrainedWarning):
        check(lower_step(*STEPS["flat with an untrained leaf"]))


def _mask_in_main_memory(own: Any, flags: Any, group: Any, device: torch.device) -> Any:
    return own(flags, group, torch.device("cpu"))


TABLE = torch.ones(4)


@pytest.mark.parametrize("plan", [None, fp.zero(1, "data"), fp.chain(fp.zero(1, "data"), fp.accumulate(2))])
def test_operands_on_two_devices_are_named(plan: Any) -> None:
    def closing(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w + TABLE).mean()

    def plain(w: Any, x: Any) -> Tensor:
        return (x["x"] @ w["w"]).mean()

    def lower(f: Any, *args: Any) -> Any:
        return fp.train_step(f, ADAMW, DATA, plan).lower(*args)

    on_cuda, mesh = fp.abstract((W, X)), r"test_for_cuda.py:\d+"
    with pytest.raises(TracingError, match=rf"{mesh}: the operands of aten.add.Tensor are .*`TABLE` of shape \(4,\)"):
        lower(closing, *on_cuda)
    with pytest.raises(TracingError, match=r"argument 1/x of shape .* on cpu, argument 0/w of shape .* is on cuda:0"):
        lower(plain, {"w": on_cuda[0]}, {"x": X})
    with pytest.raises(TracingError, match="on two devices"):
        lower(lambda w, x: (x @ w["a"] + w["b"]).mean(), {"a": on_cuda[0], "b": W}, on_cuda[1])


def test_abstract() -> None:
    half = fp.abstract({"w": W.requires_grad_(False), "n": TOKENS, "k": 3}, "cuda:1", torch.bfloat16)
    assert (half["w"].dtype, half["n"].dtype, half["k"]) == (torch.bfloat16, torch.int64, 3)
    assert half["w"].device == half["n"].device == torch.device("cuda", 1)
    made = fp.abstract(lambda: fp.functional(nn.Linear(1 << 15, 1 << 15))[1])
    assert made["weight"].shape == (1 << 15, 1 << 15) and made["bias"].is_cuda
    with pytest.raises(TypeError, match=r"fp\.functional\(module\)"):
        fp.abstract({"model": nn.Linear(2, 2)})


def test_calls_without_values_are_refused() -> None:
    train = fp.train_step(lambda w, x: (x @ w).square().mean(), ADAMW, DATA, fp.zero(1, "data"))
    w, x = fp.abstract((W, X))
    for call in (
        lambda: train.init(w),
        lambda: train(train.init(W), fp.abstract(X, "cpu")),
        lambda: train.load(w, ADAMW.init(W), 0),
    ):
        with pytest.raises(ValueError, match=r"have no values .* `.lower"):
            call()
    with pytest.raises(ValueError, match="0, 1 have no values"):
        fp.compile(fp.data_parallel("data")(lambda w, x: (x @ w).sum()), DATA)(w, x)
