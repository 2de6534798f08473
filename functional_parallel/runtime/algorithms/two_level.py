"""Two levels: within each host, then between hosts. Each byte crosses the network as rarely as possible.

With L ranks on each of H hosts: a reduce-scatter within the host, then one over 1/L of the bytes among the ranks with
the same index on every host. A gather runs the same steps in reverse. Within a host it uses shared memory if available,
else direct messages. Between hosts it uses a ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..calls import CollectiveSteps
from ..shared_memory import shared
from . import direct, ring
from .algorithm_group import AlgorithmGroup, TaggedMessages


def refuses(team: AlgorithmGroup) -> str | None:
    """Return the reason why this group does not have two levels, or None."""
    sizes = sorted({len(ranks) for ranks in team.hosts})
    if len(team.hosts) == 1:
        return "all its ranks are on one host"
    if len(sizes) > 1:
        return f"its hosts have different numbers of ranks, {sizes}"
    return "each of its hosts has one rank" if sizes == [1] else None


def reduce(team: AlgorithmGroup, messages: TaggedMessages, chunks: Sequence[Tensor], result: Tensor) -> CollectiveSteps:
    """Compute chunk i of the sum on rank i."""
    bundles = [torch.cat([chunks[rank].reshape(-1) for rank in ranks]) for ranks in team.places()]
    longest = max(bundle.numel() for bundle in bundles)
    bundles = [torch.nn.functional.pad(bundle, (0, longest - bundle.numel())) for bundle in bundles]
    mine = torch.empty_like(bundles[0])
    if team.shared is not None:
        yield from shared.reduce_scatter(team.shared, bundles, mine)
    else:
        yield from direct.reduce(team.local, messages.among(team.on_my_host), bundles, mine)
    total = torch.empty_like(result).view(-1)
    yield from ring.reduce_scatter_steps(
        team.across, messages.among(team.with_my_place), _unbundled(mine, chunks, team.with_my_place), total
    )
    result.copy_(total.view(result.shape))


def gather(team: AlgorithmGroup, messages: TaggedMessages, parts: Sequence[Tensor]) -> CollectiveSteps:
    """Receive `parts[i]` from rank i."""
    flat = [part.view(-1) for part in parts]
    across = [flat[rank] for rank in team.with_my_place]
    yield from ring.all_gather_steps(team.across, messages.among(team.with_my_place), across)
    longest = max(sum(flat[rank].numel() for rank in ranks) for ranks in team.places())
    bundles = [flat[0].new_empty(longest) for _ in team.places()]
    mine = bundles[team.local.rank]
    torch.cat(across, out=mine[: sum(part.numel() for part in across)])
    if team.shared is not None:
        yield from shared.all_gather(team.shared, mine, bundles)
    else:
        yield from direct.gather(team.local, messages.among(team.on_my_host), bundles)
    for ranks, bundle in zip(team.places(), bundles, strict=True):
        for rank, part in zip(ranks, _unbundled(bundle, flat, ranks), strict=True):
            flat[rank].copy_(part)


def _unbundled(bundle: Tensor, likes: Sequence[Tensor], ranks: Sequence[int]) -> Sequence[Tensor]:
    lengths = [likes[rank].numel() for rank in ranks]
    return list(bundle[: sum(lengths)].split(lengths))
