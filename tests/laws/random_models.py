"""Models of random layers, as plain data, so that they travel to processes: stacked, tied, masked, marked or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import P

WIDTH, HEADS, TOKENS = 8, 2, 12
LOSSES = ("mean", "masked", "sum", "weighted", "per sample")


class Kind(NamedTuple):
    """A kind of layer.

    shapes are its weights', specs how these lie over the tensor axis, and `apply` takes weights, the stream, and what
    the model embeds besides.
    """

    shapes: dict[str, tuple[int, ...]]
    specs: dict[str, P]
    apply: Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]


COLUMNS, ROWS, BIAS = P(None, "tensor"), P("tensor", None), P("tensor")


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def _mlp(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    return x + F.gelu(F.layer_norm(x, (WIDTH,)) @ w["up"] + w["bias"]) @ w["down"]


def _gated(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    h = _rms_norm(x, w["norm"])
    return x + (F.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def _attention(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    q, k, v = ((_rms_norm(x, w["norm"]) @ w[name]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in "qkv")
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + mixed.transpose(1, 2).flatten(2) @ w["out"]


def _convolution(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    return x + torch.tanh(F.conv1d(x.mT, w["kernel"], w["bias"], padding=1)).mT


def _experts(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    scores = (x @ w["router"]).softmax(-1)
    best, chosen = scores.topk(2, -1)
    gates = torch.zeros_like(scores).scatter(-1, chosen, best)
    return x + torch.einsum("btd,edf,bte->btf", x, w["experts"], gates)


def _recurrent(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    state, found = torch.zeros_like(x[:, 0]), []
    for now in x.unbind(1):
        state = torch.sigmoid(w["decay"]) * state + torch.tanh(now @ w["into"])
        found.append(state)
    return x + torch.stack(found, 1)


def _chosen(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    return torch.where(beside[..., :1] > 0, x + x @ w["into"], x * beside)


def _dropped(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    return x + fp.random.dropout(torch.tanh(x @ w["into"]), 0.3)


def _again(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    return x + fp.recompute(lambda weight, x: torch.tanh(torch.tanh(x @ weight) @ weight.T))(w["into"], x)


def _filtered(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    response = torch.complex(w["real"], w["imaginary"])
    return x + torch.fft.irfft(torch.fft.rfft(x) * response, n=WIDTH)


def _normalized(w: dict[str, Tensor], x: Tensor, beside: Tensor) -> Tensor:
    return x + F.normalize(x, dim=-1) @ (w["into"] / (1 + w["into"].norm())) + w["bias"].cumsum(0)


SQUARE, WIDE, VECTOR = (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,)

KINDS: dict[str, Kind] = {
    "mlp": Kind(
        {"up": WIDE, "bias": (4 * WIDTH,), "down": WIDE[::-1]}, {"up": COLUMNS, "bias": BIAS, "down": ROWS}, _mlp
    ),
    "gated": Kind(
        {"norm": VECTOR, "gate": WIDE, "up": WIDE, "down": WIDE[::-1]},
        {"gate": COLUMNS, "up": COLUMNS, "down": ROWS},
        _gated,
    ),
    "attention": Kind(
        {"norm": VECTOR, **dict.fromkeys(("q", "k", "v", "out"), SQUARE)},
        {"q": COLUMNS, "k": COLUMNS, "v": COLUMNS, "out": ROWS},
        _attention,
    ),
    "convolution": Kind({"kernel": (*SQUARE, 3), "bias": VECTOR}, {"kernel": P("tensor", None, None)}, _convolution),
    "experts": Kind({"router": (WIDTH, 4), "experts": (4, *SQUARE)}, {"experts": P("tensor", None, None)}, _experts),
    "recurrent": Kind({"decay": VECTOR, "into": SQUARE}, {"into": COLUMNS}, _recurrent),
    "chosen": Kind({"into": SQUARE}, {"into": COLUMNS}, _chosen),
    "dropped": Kind({"into": SQUARE}, {"into": COLUMNS}, _dropped),
    "again": Kind({"into": SQUARE}, {"into": COLUMNS}, _again),
    "filtered": Kind({"real": (WIDTH // 2 + 1,), "imaginary": (WIDTH // 2 + 1,)}, {}, _filtered),
    "normalized": Kind({"into": SQUARE, "bias": VECTOR}, {"into": ROWS}, _normalized),
}


@dataclass(frozen=True)
class Model:
    """A loss of parameters and a batch, and its parameters.

    Attributes:
        kinds: of its layers.
        stacked: layers of one kind lie in one tensor for each weight.
        tied: the head is the table of tokens.
        vocabulary: table and head are split over it.
        sequence: the stream between layers is split over time.
        marks: after which layers a stage of a pipeline ends; none for a cut in balance.
        loss: one of LOSSES.
        seed: of parameters and batches.
    """

    kinds: tuple[str, ...]
    stacked: bool
    tied: bool
    vocabulary: bool
    sequence: bool
    marks: tuple[int, ...]
    loss: str
    seed: int

    def parameters(self) -> dict[str, Any]:
        layers: Any = [{name: self._draw(*shape) for name, shape in KINDS[kind].shapes.items()} for kind in self.kinds]
        if self.stacked:
            layers = {name: torch.stack([layer[name] for layer in layers]) for name in layers[0]}
        head = {} if self.tied else {"head": self._draw(WIDTH, TOKENS)}
        return {"table": self._draw(TOKENS, WIDTH), "layers": layers, **head}

    def specs(self) -> dict[str, P]:
        """How parameters lie over the tensor axis."""
        found = {}
        for index, kind in enumerate(self.kinds):
            for name, spec in KINDS[kind].specs.items():
                if self.stacked:
                    found[f"layers/{name}"] = P(None, *spec.dim_axes())
                else:
                    found[f"layers/{index}/{name}"] = spec
        if self.vocabulary:
            found["table"] = P("tensor", None)
        if self.vocabulary and not self.tied:
            found["head"] = P(None, "tensor")
        return found

    def batch(self, step: int, samples: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 * self.seed + step)
        return {
            "tokens": torch.randint(0, TOKENS, (samples, 5), generator=generator),
            "keep": (torch.rand(samples, 4, generator=generator) < 0.7).double(),
            "weight": torch.rand(samples, generator=generator, dtype=torch.float64) + 0.1,
        }

    def __call__(self, params: dict[str, Any], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and beside it means, counts and values per sample."""
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        x, beside = params["table"][tokens], params["table"][(tokens + 1) % TOKENS].detach()
        for index, kind in enumerate(self.kinds):
            x = fp.constrain(x, P(None, "tensor")) if self.sequence else x
            x = KINDS[kind].apply(self._layer(params["layers"], index), x, beside)
            x = fp.stage_boundary(x) if index in self.marks else x
        logits = x @ (params["table"].T if self.tied else params["head"])
        each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        right = (logits.argmax(-1) == targets).double().mean()
        return self._reduced(each, batch), {"right": right, "each": each.detach().mean(1), "kept": batch["keep"].sum()}

    def _layer(self, layers: Any, index: int) -> dict[str, Tensor]:
        return {name: weight[index] for name, weight in layers.items()} if self.stacked else layers[index]

    def _reduced(self, each: Tensor, batch: dict[str, Tensor]) -> Tensor:
        keep = batch["keep"]
        if self.loss == "weighted":
            keep = keep * batch["weight"][:, None]
        if self.loss in ("masked", "weighted"):
            return (each * keep).sum() / keep.sum().clamp(min=0.1)
        if self.loss == "per sample":
            return ((each * keep).sum(1) / keep.sum(1).clamp(min=1)).mean()
        return each.sum() / 64 if self.loss == "sum" else each.mean()

    def _draw(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3


@st.composite
def models(draw: st.DrawFn, most: int = 6) -> Model:
    """Any model of two layers or more.

    Args:
        draw: hypothesis's.
        most: how many layers it has at most; four or more.
    """
    stacked = draw(st.booleans())
    if stacked:
        kinds = draw(st.sampled_from([2, 4])) * (draw(st.sampled_from(sorted(KINDS))),)
    else:
        kinds = tuple(draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=most)))
    places = st.lists(st.integers(0, len(kinds) - 2), max_size=2, unique=True).map(lambda found: tuple(sorted(found)))
    tied, vocabulary, sequence = draw(st.tuples(*[st.booleans()] * 3))
    marks = () if stacked else draw(places)
    return Model(kinds, stacked, tied, vocabulary, sequence, marks, draw(st.sampled_from(LOSSES)), draw(SEEDS))


SEEDS = st.integers(0, 99)
