"""Losses of several equal layers, each with one thing that could distinguish a copy of a layer from the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from sharding_specs import P

from .random_models import KINDS

WIDTH, SAMPLES, TIME = 8, 8, 4
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Layered:
    """A loss `loss(params, batch)` with `layers` copies of one layer.

    Attributes:
        loss: of parameters with "table" and "layers", and a batch.
        shapes: of a layer's weights.
        specs: of a layer's weights over the tensor axis.
        layers: their number.
        more: shapes of other parameters.
        stacked: whether the layers lie in one tensor for each weight.
    """

    loss: Callable[[Any, Weights], Tensor]
    shapes: dict[str, tuple[int, ...]]
    specs: dict[str, P]
    layers: int = 5
    more: tuple[tuple[str, tuple[int, ...]], ...] = ()
    stacked: bool = False

    def parameters(self) -> Any:
        layers: Any = [{name: draw(*shape, seed=n) for name, shape in self.shapes.items()} for n in range(self.layers)]
        if self.stacked:
            layers = {name: torch.stack([weights[name] for weights in layers]) for name in self.shapes}
        return {"table": draw(12, WIDTH), "layers": layers, **{name: draw(*shape) for name, shape in self.more}}

    def rules(self) -> dict[str, P]:
        if self.stacked:
            return {f"layers/{name}": P(None, *spec.dims) for name, spec in self.specs.items()} | {"*": P()}
        return {f"layers/*/{name}": spec for name, spec in self.specs.items()} | {"*": P()}


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3


def batch() -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {
        "tokens": torch.randint(0, 12, (SAMPLES, TIME), generator=generator),
        "targets": torch.randn(SAMPLES, TIME, WIDTH, generator=generator, dtype=torch.float64),
    }


def ends(stream: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Weights], Tensor]:
    """A loss with this function of the parameters and of the embedded tokens inside."""

    def loss(params: Any, batch: Weights) -> Tensor:
        x = F.embedding(batch["tokens"], params["table"])
        return ((stream(params, x) - batch["targets"]) ** 2).mean()

    return loss


def as_it_is(layer: Callable[..., Any]) -> Callable[..., Any]:
    return layer


mark = as_it_is  # of the layers of all models, so that a test can replace it


def chain(layer: Callable[[Weights, Tensor], Tensor]) -> Callable[[Any, Weights], Tensor]:
    def stream(params: Any, x: Tensor) -> Tensor:
        marked = mark(layer)
        for weights in params["layers"]:
            x = marked(weights, x)
        return x

    return ends(stream)


UP_DOWN = {"up": (WIDTH, 16), "down": (16, WIDTH)}
COLUMNS_ROWS = {"up": P(None, "tensor"), "down": P("tensor", None)}


def mlp(w: Weights, x: Tensor) -> Tensor:
    return x + F.gelu(F.layer_norm(x, (WIDTH,)) @ w["up"]) @ w["down"]


def biased(w: Weights, x: Tensor) -> Tensor:
    return x + torch.tanh(x @ w["up"] + w["bias"]) @ w["down"]


def dropped(w: Weights, x: Tensor) -> Tensor:
    return F.dropout(mlp(w, x), 0.3)


def post_norm(w: Weights, x: Tensor) -> Tensor:
    return F.layer_norm(mlp(w, x), (WIDTH,), w["scale"], w["shift"])


def recomputed(w: Weights, x: Tensor) -> Tensor:
    return fp.recompute(mlp)(w, x)


def marked(w: Weights, x: Tensor) -> Tensor:
    return fp.stage_boundary(mlp(w, x))


def in_place(w: Weights, x: Tensor) -> Tensor:
    h = F.gelu(x @ w["up"]) @ w["down"]
    h.mul_(0.5).add_(x)
    h[:, 0] *= 2.0
    return h


def chunked(w: Weights, x: Tensor) -> Tensor:
    a, b = (x @ w["up"]).chunk(2, -1)
    return x + torch.cat([a.sin(), b], -1) @ w["down"]


CLOSED_OVER = torch.arange(8.0, dtype=torch.float64).cos()


def closed_over(w: Weights, x: Tensor) -> Tensor:
    return mlp(w, x * CLOSED_OVER) + torch.tensor([0.5], dtype=torch.float64)


def without_gradient(w: Weights, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(F.layer_norm(x, (WIDTH,), w["scale"]) @ w["up"])
    return x + (gate * (x @ w["up"])) @ w["down"]


def top_k(w: Weights, x: Tensor) -> Tensor:
    scores = (x @ w["router"]).softmax(-1)
    best, chosen = scores.topk(2, -1)
    gates = torch.zeros_like(scores).scatter(-1, chosen, best)
    kept = F.one_hot(chosen, 4).sum(-2).to(x.dtype)
    return x + torch.einsum("btd,edf,bte->btf", x, w["experts"], gates * kept)


def own_derivative(w: Weights, x: Tensor) -> Tensor:
    """A step down the gradient of an energy."""
    return x - 0.1 * fp.grad(lambda h: (torch.tanh(h @ w["up"]) ** 2).sum())(x) @ (w["up"] @ w["down"])


def batch_norm(w: Weights, x: Tensor) -> Tensor:
    h = F.batch_norm((x @ w["up"]).flatten(0, 1), None, None, w["scale"], None, training=True)
    return x + torch.tanh(h).unflatten(0, x.shape[:2]) @ w["down"]


def _tied(params: Any, x: Tensor) -> Tensor:
    """One weight in each layer, twice, and after them."""
    shared = params["shared"]
    layer = mark(lambda w, x: x + torch.tanh(x @ shared) @ w["square"] @ shared)
    for w in params["layers"]:
        x = layer(w, x)
    return x @ shared


def _biased(params: Any, x: Tensor) -> Tensor:
    """A trained mask of all layers, computed before them."""
    mask = params["shared"][:TIME, :TIME].softmax(-1)
    layer = mark(lambda w, x: x + (mask @ x) @ w["square"])
    for w in params["layers"]:
        x = layer(w, x)
    return x


def _skipped(params: Any, x: Tensor) -> Tensor:
    """The first value is read by each layer."""
    first, layer = x, mark(lambda w, x: torch.tanh(x @ w["square"]) + first)
    for w in params["layers"]:
        x = layer(w, x)
    return x


def _u_net(params: Any, x: Tensor) -> Tensor:
    half, found = len(params["layers"]) // 2, []
    for w in params["layers"][:half]:
        x = F.layer_norm(x, (WIDTH,)) + torch.tanh(x @ w["square"])
        found.append(x)
    up = mark(lambda w, x, skip: F.layer_norm(x + skip, (WIDTH,)) + torch.tanh(x @ w["square"]) * skip)
    for w in params["layers"][half:]:
        x = up(w, x, found.pop())
    return x


def _dense(params: Any, x: Tensor) -> Tensor:
    """Each layer's value is read by the next two layers, and by the end."""
    before, total = x, torch.zeros_like(x)
    for w in params["layers"]:
        x, before = x + torch.tanh(before @ w["square"]), x
        total = total + torch.sigmoid(x)
    return total + x


def _alternating(params: Any, x: Tensor) -> Tensor:
    layer = mark(lambda w, x, is_mlp: mlp(w, x) if is_mlp else x + torch.tanh(x @ w["up"]) @ w["down"])
    for index, w in enumerate(params["layers"]):
        x = layer(w, x, bool(index % 2))
    return x


def _mixed(params: Any, x: Tensor) -> Tensor:
    """Two streams, each of which reads the other."""
    a, b = x, x.sin()
    layer = mark(lambda w, a, b: (a + torch.tanh(b @ w["square"]), b * (1 + torch.sigmoid(a))))
    for w in params["layers"]:
        a, b = layer(w, a, b)
    return a + b


def _unbound(params: Any, x: Tensor) -> Tensor:
    """The layers read results of one op before them."""
    table = x.repeat_interleave(len(params["layers"]), -1).chunk(len(params["layers"]), -1)
    for w, part in zip(params["layers"], table, strict=True):
        x = x + torch.tanh((x * part) @ w["square"])
    return x


def _unread(params: Any, x: Tensor) -> Tensor:
    """The end reads a result of each layer without a gradient, and only that depends on the dropped shared weight."""
    shared, found = F.dropout(fp.constrain(params["shared"], P()), 0.3), []
    for w in params["layers"]:
        x = x + torch.tanh(F.layer_norm(x, (WIDTH,)) @ w["square"])
        found.append(torch.tanh(x @ shared).exp())
    return x + torch.stack(found).sum(0).detach()


def _cut_off(params: Any, x: Tensor) -> Tensor:
    """No gradient reaches the layers before a later one."""
    for index, w in enumerate(params["layers"]):
        x = F.layer_norm(x + w["square"][0].expand_as(x), (WIDTH,))
        x = x + torch.tanh(x @ params["shared"]) @ params["shared"].T
        if index == 1:
            x = x * 2
        if index == 4:
            with torch.no_grad():
                x = torch.tanh(x @ w["square"])
    return x


def _indexed(params: Any, x: Tensor) -> Tensor:
    layer = mark(mlp)
    for index in range(len(params["layers"]["up"])):
        x = layer({name: stacked[index] for name, stacked in params["layers"].items()}, x)
    return x


def _split_up(params: Any, x: Tensor) -> Tensor:
    layer = mark(mlp)
    for up, down in zip(params["layers"]["up"].unbind(), params["layers"]["down"], strict=True):
        x = layer({"up": up, "down": down}, x)
    return x


def _sliced(params: Any, x: Tensor) -> Tensor:
    """Two layers at a time."""
    for index in range(0, len(params["layers"]["up"]), 2):
        up, down = (params["layers"][name][index : index + 2] for name in ("up", "down"))
        x = x + torch.einsum("btd,ndf,nfe->bte", F.layer_norm(x, (WIDTH,)), up, down)
    return x


def _stacked_inside(params: Any, x: Tensor) -> Tensor:
    """The model stacks its layers, and takes them apart."""
    stacked = {name: torch.stack([w[name] for w in params["layers"]]) for name in ("up", "down")}
    return _indexed({"layers": stacked}, x)


def _windows(params: Any, x: Tensor) -> Tensor:
    """Each layer reads other columns of a value that a plan may split along them, and other positions of another."""
    wide, first, layer = x @ params["layers"][0]["up"], x.cos(), mark(mlp)
    for index, w in enumerate(params["layers"]):
        x = layer(w, x * first[:, index % TIME, None]) * wide[..., index : index + WIDTH] + wide[..., index, None]
    return x


def _sizes(params: Any, x: Tensor) -> Tensor:
    """Layers of two widths, in no period."""
    layer = mark(mlp)
    for index, w in enumerate(params["layers"]):
        half = slice(0, 8 if index in (0, 3, 4) else 16)
        x = layer({"up": w["up"][:, half], "down": w["down"][half]}, x)
    return x


def _crossed(params: Any, x: Tensor) -> Tensor:
    """Each layer has two inputs and two results, as an encoder beside a decoder has."""

    def layer(w: Weights, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b = mlp(w, b)
        mixed = F.scaled_dot_product_attention(a @ w["up"], b @ w["up"], b @ w["down"].T)
        return a + mixed @ w["down"], b

    marked, beside = mark(layer), x.flip(1)
    for w in params["layers"]:
        x, beside = marked(w, x, beside)
    return x * beside


class Block(torch.nn.Module):
    """A layer as of Hugging Face: it knows its number, has options as keywords, and returns a tuple."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.query, self.key, self.value, self.out = (
            torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(4)
        )

    def forward(self, x: Tensor, *, mask: Tensor | None = None, cache: dict[int, Any] | None = None) -> tuple[Tensor]:
        h = self.norm(x)
        q, k, v = (each(h).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        if cache is not None:
            cache[self.index] = k, v
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (x + self.out(mixed.transpose(1, 2).flatten(2)),)


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(map(Block, range(5)))

    def forward(self, x: Tensor) -> Tensor:
        cache: dict[int, Any] = {}
        mask = torch.ones(TIME, TIME, dtype=torch.bool, device=x.device).tril()
        for block in self.blocks:
            x = block(x, mask=mask, cache=cache)[0]
        return x + sum((k * v).mean((1, 3))[..., None] for k, v in cache.values())


DECODER = Decoder()


def _of_modules(params: Any, x: Tensor) -> Tensor:
    given = {f"blocks.{n}.{name}": each for n, w in enumerate(params["layers"]) for name, each in w.items()}
    found: Tensor = torch.func.functional_call(DECODER, given, (x,))
    return found


def _of(kind: str) -> Layered:
    shapes, specs, apply = KINDS[kind]
    return Layered(chain(lambda w, x: apply(w, x, x.detach())), shapes, specs)


SQUARE = {"square": (WIDTH, WIDTH)}
NORMED = {**UP_DOWN, "scale": (WIDTH,), "shift": (WIDTH,)}

BLOCK = ((name, tuple(weight.shape)) for name, weight in Block(0).named_parameters())

LAYERED: dict[str, Layered] = {
    "mlp": Layered(chain(mlp), UP_DOWN, COLUMNS_ROWS),
    "post norm": Layered(chain(post_norm), NORMED, COLUMNS_ROWS),
    "dropout": Layered(chain(dropped), UP_DOWN, COLUMNS_ROWS),
    "recomputed": Layered(chain(recomputed), UP_DOWN, COLUMNS_ROWS),
    "marked": Layered(chain(marked), UP_DOWN, COLUMNS_ROWS),
    "in place": Layered(chain(in_place), UP_DOWN, COLUMNS_ROWS),
    "chunked": Layered(chain(chunked), UP_DOWN, {}),
    "closed over": Layered(chain(closed_over), UP_DOWN, COLUMNS_ROWS),
    "no gradient": Layered(chain(without_gradient), NORMED, COLUMNS_ROWS),
    "top k": Layered(
        chain(top_k), {"router": (WIDTH, 4), "experts": (4, WIDTH, WIDTH)}, {"experts": P("tensor", None, None)}
    ),
    "own derivative": Layered(chain(own_derivative), UP_DOWN, COLUMNS_ROWS),
    "batch norm": Layered(chain(batch_norm), {**UP_DOWN, "scale": (16,)}, {}),
    "tied": Layered(ends(_tied), SQUARE, {}, more=(("shared", (WIDTH, WIDTH)),)),
    "trained mask": Layered(ends(_biased), SQUARE, {}, more=(("shared", (WIDTH, WIDTH)),)),
    "skip": Layered(ends(_skipped), SQUARE, {}),
    "U-Net": Layered(ends(_u_net), SQUARE, {}, layers=8),
    "dense": Layered(ends(_dense), SQUARE, {}, layers=6),
    "alternating": Layered(ends(_alternating), UP_DOWN, COLUMNS_ROWS, layers=8),
    "two streams": Layered(ends(_mixed), SQUARE, {}),
    "unbound": Layered(ends(_unbound), SQUARE, {}),
    "unread results": Layered(ends(_unread), SQUARE, {}, more=(("shared", (WIDTH, WIDTH)),)),
    "cut off": Layered(ends(_cut_off), SQUARE, {}, layers=7, more=(("shared", (WIDTH, WIDTH)),)),
    "stacked, by index": Layered(ends(_indexed), UP_DOWN, COLUMNS_ROWS, stacked=True),
    "stacked, unbound": Layered(ends(_split_up), UP_DOWN, COLUMNS_ROWS, stacked=True),
    "stacked, in slices": Layered(ends(_sliced), UP_DOWN, COLUMNS_ROWS, layers=8, stacked=True),
    "stacked inside": Layered(ends(_stacked_inside), UP_DOWN, COLUMNS_ROWS),
    "windows": Layered(ends(_windows), UP_DOWN, COLUMNS_ROWS),
    "several sizes": Layered(ends(_sizes), UP_DOWN, {}, layers=7),
    "two inputs": Layered(ends(_crossed), UP_DOWN, COLUMNS_ROWS),
    "uneven": Layered(chain(biased), {"up": (WIDTH, 15), "bias": (15,), "down": (15, WIDTH)}, {}),
    "modules": Layered(ends(_of_modules), dict(BLOCK), {"query.weight": P("tensor"), "out.weight": P(None, "tensor")}),
    **{f"random: {kind}": _of(kind) for kind in sorted(KINDS)},
}
