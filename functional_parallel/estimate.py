"""What training will hold on each rank, from shapes and specs alone: nothing is traced, and no tensor is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from sharding_specs import Mesh, broadcast_specs, local_shape

from .optim import Optimizer, sgd
from .program.explain import readable_bytes
from .scaled import with_scale
from .train import train_step

__all__ = ["CONVENTIONS", "Convention", "Estimate", "activation_bytes", "estimate", "transformer_parameters"]


class Convention(NamedTuple):
    """Bytes per element that training keeps; publications count differently."""

    parameters: int
    gradients: int
    optimizer: int  # master copy and moments


CONVENTIONS = {
    "zero": Convention(2, 2, 12),  # fp16; fp32 master, mean, square: ZeRO, arXiv 1910.02054 §3.1
    "megatron": Convention(2, 4, 12),  # bf16, gradients summed in fp32: Megatron-LM's distributed optimizer
    "fp16": Convention(2, 2, 16),  # with an fp32 copy of the gradients
    "fp32": Convention(4, 4, 8),  # no master copy
}


@dataclass(frozen=True)
class Estimate:
    """Bytes per rank between steps; print it for a table."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer", "total")
        return "\n".join(f"{name.ljust(10)}  {readable_bytes(getattr(self, name))}" for name in names)


def estimate(
    params: Any,
    mesh: Mesh,
    plan: Callable[..., Any] | None = None,
    *,
    convention: str | Convention = "zero",
    optimizer: Optimizer | None = None,
) -> Estimate:
    """The bytes of parameters, gradients and optimizer state that each rank keeps under a plan.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> model = torch.empty(7_500_000_000, device="meta")
    >>> for stage in range(4):
    ...     print(f"{fp.estimate(model, Mesh(data=64), fp.zero(stage, 'data')).total / 1e9:.1f}")
    120.0
    31.4
    16.6
    1.9

    Args:
        params: a pytree of tensors, on the meta device or any other.
        mesh: the mesh.
        plan: a transform or a chain; without it every rank keeps everything.
        convention: bytes per element of a floating parameter: "zero", "megatron", "fp16", "fp32" or a `Convention`.
        optimizer: count what `train_step` with this optimizer keeps instead: every tensor in its own dtype, gradients
            like the parameters, a loss scale if there is one. `mixed_precision` leaves all of it in float32.

    Returns:
        The bytes. Activations come on top; see `activation_bytes`.

    Raises:
        ValueError: when there is no such convention.
    """
    shapes = optree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, params)
    train = train_step(lambda *_: None, optimizer or sgd(0.0), mesh, plan)
    places = train.places(shapes)
    packed = places.packing.pack_whole(shapes)
    partial = (shapes, places.kept) if train.f.layout.whole_gradients else (packed, places.update)
    if optimizer is not None:
        state = places.packed_state(with_scale(optimizer.init(shapes), train.scaling))
        parts = (_bytes(shapes, places.kept, mesh), _bytes(*partial, mesh, others=False))
        return Estimate(*parts, _bytes(state, places.state(state, optimizer), mesh))
    each = _convention(convention)
    return Estimate(
        _bytes(shapes, places.kept, mesh, each.parameters),
        _bytes(*partial, mesh, each.gradients, others=False),
        _bytes(packed, places.update, mesh, each.optimizer, others=False),
    )


def _convention(name: str | Convention) -> Convention:
    if isinstance(name, Convention):
        return name
    if name not in CONVENTIONS:
        known = ", ".join(map(repr, CONVENTIONS))
        raise ValueError(f"estimate(convention={name!r}): the known ones are {known}; or give a Convention")
    return CONVENTIONS[name]


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _bytes(tree: Any, specs: Any, mesh: Mesh, each: int | None = None, *, others: bool = True) -> int:
    """Bytes of a tree's tensors on a rank: `each` per floating element, own size for `others`, the rest of them."""
    leaves, places = optree.tree_leaves(tree), optree.tree_leaves(broadcast_specs(specs, tree))
    total = 0
    for leaf, spec in zip(leaves, places, strict=True):
        if isinstance(leaf, torch.Tensor) and (others or _is_trained(leaf)):
            size = each if each is not None and _is_trained(leaf) else leaf.dtype.itemsize
            total += size * math.prod(local_shape(leaf.shape, spec.fitted(leaf.shape, mesh), mesh))
    return total


# -----------------------------------------------------------------------------
# Transformers, by formula
# -----------------------------------------------------------------------------


def transformer_parameters(layers: int, hidden: int, vocabulary: int, sequence: int) -> int:
    """The parameters of a GPT with learned positions and a tied head (Narayanan et al., arXiv 2104.04473, equation 2).

    >>> f"{transformer_parameters(layers=96, hidden=12288, vocabulary=51200, sequence=2048) / 1e9:.1f}"
    '174.6'

    Args:
        layers: blocks.
        hidden: width.
        vocabulary: rows of the embedding.
        sequence: positions.
    """
    return 12 * layers * hidden**2 + 13 * layers * hidden + (vocabulary + sequence) * hidden


def activation_bytes(
    batch: int,
    sequence: int,
    hidden: int,
    heads: int,
    *,
    layers: int = 1,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    partitioned: bool = False,
    pipeline: int = 1,
    interleave: int = 1,
) -> float:
    """Bytes of 16-bit activations that a rank keeps for the backward (Korthikanti et al., arXiv 2205.05198, table 2).

    A block keeps s b h (34 + 5 a s / h) bytes; the tensor axis splits all but 10 s b h of them, and those too where the
    sequence is split between its regions. Embedding and head are not counted.

    >>> activation_bytes(1, 2048, 12288, 96, tensor=8, sequence_parallel=True, recompute="selective") / 2**20
    102.0

    Args:
        batch: samples in a microbatch.
        sequence: tokens in a sample.
        hidden: width.
        heads: attention heads of a whole block.
        layers: blocks of the whole model: a first stage under 1F1B holds as many blocks' worth as the model has.
        tensor: size of the tensor axis.
        sequence_parallel: whether norms and dropout split the sequence over it.
        recompute: "none", "selective" (the attention core again in the backward) or "full" (only a block's input kept).
        partitioned: with "full", split the kept inputs over the tensor axis (ZeRO-R's P_a, arXiv 1910.02054 §6.1).
        pipeline, interleave: stages, and chunks of the model per stage; interleaving holds 1 + (p−1)/(p v) as much.

    Raises:
        ValueError: when there is no such way to recompute.
    """
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"activation_bytes(recompute={recompute!r}): it is 'none', 'selective' or 'full'")
    unit = sequence * batch * hidden
    if recompute == "full":
        block = 2 * unit / (tensor if partitioned else 1)
    else:
        core = 0 if recompute == "selective" else 5 * heads * sequence**2 * batch
        block = 10 * unit / (tensor if sequence_parallel else 1) + (24 * unit + core) / tensor
    return block * layers * (1 + (pipeline - 1) / (pipeline * interleave) if interleave > 1 else 1)
