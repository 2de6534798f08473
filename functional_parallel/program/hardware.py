"""The machines that a price is for: what a rank computes with, and what connects ranks in a host and between hosts.

A collective over n ranks that lie on several hosts goes on two levels: within every host, and between hosts, where each
rank of a host carries its part (Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005; NCCL's rings and PAT, arXiv
2506.20252). With S the bytes of the whole value, g ranks of the group on a host and h hosts, it takes

| kind | seconds, besides the start |
|---|---|
| all_gather, psum_scatter | ⌈log₂ g⌉ α + (g−1)/g · S β within a host, ⌈log₂ h⌉ α' + (h−1)/h · S/g β' between hosts |
| psum, pmax, pmin | twice that: summed and scattered, then gathered |
| all_to_all | (g−1) α + (g−1)/n · S β, and (n−g) α' + (n−g)/n · S β' |
| pbroadcast | ⌈log₂ h⌉ α' + S β', then ⌈log₂ g⌉ α + S β |
| ppermute, send | α + S β of the slowest link that it takes |

so the bytes sum up to those of `Collective.bytes`. With `ring`, n − 1 rounds take the place of ⌈log₂ n⌉.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sharding_specs import Mesh

from .collectives import Collective
from .links import Line

__all__ = ["HARDWARE", "GroupTopology", "Hardware", "group_topology", "hardware_of"]


class GroupTopology(NamedTuple):
    """How a group of ranks lies: so many on each of so many hosts."""

    inside: int
    hosts: int


@dataclass(frozen=True)
class Hardware:
    """What a rank computes with, and what connects ranks. Rates are data sheets' peaks, shares what is reached of them.

    >>> import functional_parallel as fp
    >>> print(fp.Hardware.named("h100"))
    h100: 989 TFLOP/s, 80 GB at 3350 GB/s; 8 ranks on a host, 3 µs + n / 450.0 GB/s; between hosts 14 µs + n / 50.0 GB/s

    Attributes:
        name: for titles.
        flops: by dtype, the products of a rank per second, two flops for a multiplication and addition.
        bandwidth: bytes per second that a rank reads and writes in its memory.
        capacity: bytes of that memory.
        ranks_per_host: how many ranks a host has; ranks are numbered host by host.
        inside: a message from a rank to another of its host.
        between: a message from a rank to one of another host, when all of a host's ranks send.
        launch: seconds to start an op.
        start: seconds to start a collective.
        flops_share, bandwidth_share, links_share: of the peaks, what large products, copies and messages reach.
        ring: whether collectives take n − 1 rounds, as plain rings do.
    """

    name: str
    flops: Mapping[torch.dtype, float]
    bandwidth: float
    capacity: int
    ranks_per_host: int
    inside: Line
    between: Line
    launch: float = 2e-6
    start: float = 8.4e-6  # NCCL's base latency of a ring, src/graph/tuning.cc
    flops_share: float = 0.75
    bandwidth_share: float = 0.85
    links_share: float = 0.8
    ring: bool = False

    def __post_init__(self) -> None:
        names = ("bandwidth", "ranks_per_host", "flops_share", "bandwidth_share", "links_share")
        rates = {name: getattr(self, name) for name in names} | {str(dtype): rate for dtype, rate in self.flops.items()}
        wrong = [f"{name}={value!r}" for name, value in rates.items() if not value > 0]
        if wrong or not self.flops:
            raise ValueError(f"Hardware {self.name!r}: rates are positive, not {', '.join(wrong) or 'flops={}'}")

    @staticmethod
    def named(name: str) -> Hardware:
        """One of the machines that are known: "h100", "a100", "v100", eight of them on a host.

        Raises:
            ValueError: for another name.
        """
        if name not in HARDWARE:
            known = ", ".join(map(repr, HARDWARE))
            raise ValueError(f"no hardware is known as {name!r}, only {known}; or describe yours with fp.Hardware(…)")
        return HARDWARE[name]

    def rate(self, dtype: torch.dtype) -> float:
        """Products per second at the peak; of a dtype that is not listed, those of the slowest that is."""
        return self.flops.get(dtype) or min(self.flops.values())

    def compute(self, flops: int, moved: int, dtype: torch.dtype) -> float:
        """Seconds of an op: its products or its memory, whichever takes longer (Williams et al., CACM 52, 2009)."""
        products = flops / (self.rate(dtype) * self.flops_share)
        return self.launch + max(products, moved / (self.bandwidth * self.bandwidth_share))

    # --- communication ---

    def collective(self, one: Collective, mesh: Mesh) -> float:
        """Seconds of a collective of a program on a mesh, nothing else being under way."""
        whole = one.result.nbytes if one.kind == "all_gather" else one.operand.nbytes
        return self.start + self._seconds(one.kind, whole, group_topology(mesh, one.axes, self.ranks_per_host))

    def message(self, mesh: Mesh, axis: str) -> Line:
        """A message to another rank of an axis: of those, the pair that is furthest apart."""
        link = self.between if group_topology(mesh, (axis,), self.ranks_per_host).hosts > 1 else self.inside
        return Line(self.start + link.alpha, link.beta / self.links_share)

    def _seconds(self, kind: str, size: float, reach: GroupTopology) -> float:
        inside, hosts = reach
        if kind in ("all_gather", "psum_scatter"):
            return self._half(inside, size, self.inside) + self._half(hosts, size / inside, self.between)
        if kind == "all_to_all":
            n, near, far = inside * hosts, inside - 1, inside * (hosts - 1)
            return self._line(self.inside, near, near / n * size) + self._line(self.between, far, far / n * size)
        if kind == "pbroadcast":
            return sum(
                self._line(line, self._rounds(n), size if n > 1 else 0)
                for n, line in ((inside, self.inside), (hosts, self.between))
            )
        if kind in ("ppermute", "send"):
            return self._line(self.between if hosts > 1 else self.inside, 1, size)
        return 2 * self._seconds("all_gather", size, reach)

    def _half(self, n: int, size: float, line: Line) -> float:
        """Half an all-reduce between n ranks."""
        return self._line(line, self._rounds(n), (n - 1) / n * size)

    def _rounds(self, n: int) -> int:
        return n - 1 if self.ring else math.ceil(math.log2(n))

    def _line(self, line: Line, rounds: int, size: float) -> float:
        return rounds * line.alpha + size * line.beta / self.links_share

    def __str__(self) -> str:
        return (
            f"{self.name}: {_readable(max(self.flops.values()), 'TFLOP/s')}, {_readable(self.capacity, 'GB')} at "
            f"{_readable(self.bandwidth, 'GB/s')}; {self.ranks_per_host} ranks on a host, {self.inside}; between hosts "
            f"{self.between}"
        )


_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def _readable(amount: float, unit: str) -> str:
    """Return an amount in a unit, or with a smaller prefix where it would be below 1.

    >>> _readable(3.35e12, "GB/s"), _readable(989e12, "TFLOP/s"), _readable(48.6e9, "TFLOP/s"), _readable(1, "GB")
    ('3350 GB/s', '989 TFLOP/s', '48.6 GFLOP/s', '1 B')
    """
    largest, rest = _PREFIXES[unit[0]], unit[1:]
    for prefix, size in _PREFIXES.items():
        if size <= min(largest, amount):
            number = amount / size
            return f"{number:.0f} {prefix}{rest}" if number >= 100 else f"{number:.3g} {prefix}{rest}"
    return f"{amount:.3g} {rest}"


def group_topology(mesh: Mesh, axes: Iterable[str], ranks_per_host: int) -> GroupTopology:
    """How a group over some axes lies on hosts, without a list of its ranks.

    >>> reach_of(Mesh(data=512, tensor=8, pipe=4), ("data",), 8), reach_of(Mesh(data=512, tensor=8), ("tensor",), 8)
    (Reach(inside=1, hosts=512), Reach(inside=8, hosts=1))

    Args:
        mesh: the mesh, its last axis varying fastest.
        axes: the axes of the group.
        ranks_per_host: how many consecutive ranks share a host.
    """
    named, inside, stride = set(axes), 1, 1
    for name, size in reversed(mesh.shape.items()):
        if name in named:
            inside *= min(size, max(1, ranks_per_host // stride))
        stride *= size
    return GroupTopology(inside, math.ceil(mesh.axis_size(named) / inside))


def hardware_of(hardware: Hardware | str) -> Hardware:
    """A description, or a known one by its name."""
    if isinstance(hardware, str):
        return Hardware.named(hardware)
    if not isinstance(hardware, Hardware):
        raise TypeError(
            f"a price is for hardware known by name, such as 'h100', or an fp.Hardware(…), not {hardware!r}"
        )
    return hardware


# Peaks without sparsity from NVIDIA's data sheets (SXM); float32 products as torch does them, without TF32. Links one
# way: NVLink of a rank, and its share of a DGX's InfiniBand. Latencies per round are NCCL's (src/graph/tuning.cc:
# "simple", NVLink 3.4 µs and network 14 µs).
_HALF = (torch.bfloat16, torch.float16)
_NVLINK, _NETWORK = 3.4e-6, 14e-6

HARDWARE = {
    one.name: one
    for one in (
        Hardware(
            "h100",
            {**dict.fromkeys(_HALF, 989e12), torch.float32: 67e12, torch.float64: 67e12},
            3.35e12,
            80 * 10**9,
            8,
            Line(_NVLINK, 1 / 450e9),
            Line(_NETWORK, 1 / 50e9),
        ),
        Hardware(
            "a100",
            {**dict.fromkeys(_HALF, 312e12), torch.float32: 19.5e12, torch.float64: 19.5e12},
            2.039e12,
            80 * 10**9,
            8,
            Line(_NVLINK, 1 / 300e9),
            Line(_NETWORK, 1 / 25e9),
        ),
        Hardware(
            "v100",
            {torch.float16: 125e12, torch.float32: 15.7e12, torch.float64: 7.8e12},
            0.9e12,
            32 * 10**9,
            8,
            Line(_NVLINK, 1 / 150e9),
            Line(_NETWORK, 1 / 6.25e9),
        ),
    )
}
