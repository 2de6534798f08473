"""Machines for price predictions: the compute of a rank, and the links within and between hosts (docs/price.md).

A message takes latency + bytes × time per byte, the α-β model (Hockney, Parallel Computing 20, 1994). A collective over
several hosts has two levels (Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005; NCCL's rings and PAT, arXiv 2506.20252).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from sharding_specs import Mesh

from .traffic import Collective


@dataclass(frozen=True)
class Line:
    """Seconds for n bytes: `alpha + beta * n`.

    >>> print(Line(5e-6, 1 / 50e9))
    5 µs + n / 50.0 GB/s
    >>> print(Line(20e-3, 1 / 2.5e6))
    20000 µs + n / 2.5 MB/s

    Attributes:
        alpha: seconds of an empty message.
        beta: seconds per byte.
    """

    alpha: float
    beta: float

    def seconds(self, size: float) -> float:
        return self.alpha + self.beta * size

    def __str__(self) -> str:
        unit, name = (1e9, "GB/s") if self.beta * 1e8 <= 1 else (1e6, "MB/s")
        return f"{1e6 * self.alpha:.0f} µs + n / {1 / unit / self.beta:.1f} {name}"


@dataclass(frozen=True)
class Hardware:
    """Compute and links of the ranks of a machine. Rates are data sheets' peaks; shares are the fractions reached.

    >>> import functional_parallel as fp
    >>> print(fp.Hardware.named("h100"))
    h100: 989 TFLOP/s, 80 GB at 3350 GB/s; 8 ranks on a host, 3 µs + n / 450.0 GB/s; between hosts 14 µs + n / 50.0 GB/s

    Attributes:
        name: for titles.
        flops: peak floating-point operations per second of a rank's products, by dtype; a multiplication and addition
            is two.
        bandwidth: bytes per second that a rank reads and writes in its memory.
        capacity: bytes of that memory.
        ranks_per_host: number of ranks of a host; ranks are numbered host by host.
        inside: a message from a rank to another of its host.
        between: a message from a rank to a rank of another host, while all ranks of the host send.
        launch: seconds to start an op.
        start: seconds to start a collective.
        flops_share, bandwidth_share, links_share: fractions of the peaks that large products, copies and messages
            reach.
        ring: whether collectives take n − 1 rounds, as plain rings do.
        both_ways: fraction of a link's rate that each direction reaches while both carry data. Through the memory of
            the host it can be far below 1. Broadcasts, scatters, gathers and reductions to one rank use one direction.
        host: a move between the memories of a rank and its host, while all ranks of the host move.
        disk: a move between a rank's memories and its share of a disk, in one direction.
        host_bandwidth: bytes per second of the host's memory for the ops of a rank, while all ranks compute there.
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
    both_ways: float = 1.0
    host: Line = Line(10e-6, 1 / 25e9)
    host_bandwidth: float = 50e9
    disk: Line = Line(100e-6, 1 / 2e9)

    def __post_init__(self) -> None:
        names = (
            "bandwidth",
            "host_bandwidth",
            "ranks_per_host",
            "flops_share",
            "bandwidth_share",
            "links_share",
            "both_ways",
        )
        rates = {name: getattr(self, name) for name in names} | {str(dtype): rate for dtype, rate in self.flops.items()}
        wrong = [f"{name}={value!r}" for name, value in rates.items() if not value > 0]
        if wrong or not self.flops:
            raise ValueError(f"Hardware {self.name!r}: rates are positive, not {', '.join(wrong) or 'flops={}'}")

    @staticmethod
    def named(name: str) -> Hardware:
        """Return a known machine: "h100", "a100" or "v100", each with eight ranks on a host.

        Raises:
            ValueError: for another name.
        """
        if name not in HARDWARE:
            known = ", ".join(map(repr, HARDWARE))
            raise ValueError(f"no hardware is known as {name!r}, only {known}; or describe yours with fp.Hardware(…)")
        return HARDWARE[name]

    def rate(self, dtype: torch.dtype) -> float:
        """Peak flops per second for a dtype. A dtype that is not listed has the rate of the slowest listed one."""
        return self.flops.get(dtype) or min(self.flops.values())

    def compute(self, flops: int, moved: int, dtype: torch.dtype) -> float:
        """Seconds of an op: the longer of its products and its memory traffic (Williams et al., CACM 52, 2009)."""
        products = flops / (self.rate(dtype) * self.flops_share)
        return self.launch + max(products, moved / (self.bandwidth * self.bandwidth_share))

    def on_host(self, moved: int) -> float:
        """Seconds of an op in the host's memory, which is an elementwise one of an update."""
        return self.launch + moved / (self.host_bandwidth * self.bandwidth_share)

    def collective(self, one: Collective, mesh: Mesh) -> float:
        """Seconds of a collective of a program on a mesh, if nothing else is in flight."""
        whole = one.result.nbytes if one.kind in ("all_gather", "gather") else one.operand.nbytes
        size = whole if one.kind in _ONE_WAY else whole / self.both_ways
        return self.start + self._seconds(one.kind, size, group_topology(mesh, one.axes, self.ranks_per_host))

    def message(self, mesh: Mesh, axis: str) -> Line:
        """Cost of a message to another rank along an axis, for the most distant pair of ranks."""
        _, hosts = group_topology(mesh, (axis,), self.ranks_per_host)
        link = self.between if hosts > 1 else self.inside
        return Line(self.start + link.alpha, link.beta / self.links_share)

    def _seconds(self, kind: str, size: float, reach: tuple[int, int]) -> float:
        inside, hosts = reach
        if kind in ("all_gather", "psum_scatter"):
            return self._half(inside, size, self.inside) + self._half(hosts, size / inside, self.between)
        if kind in ("all_to_all", "scatter", "gather"):
            n, near, far = inside * hosts, inside - 1, inside * (hosts - 1)
            return self._line(self.inside, near, near / n * size) + self._line(self.between, far, far / n * size)
        if kind in ("pbroadcast", "broadcast", "reduce"):
            return sum(
                self._line(line, self._rounds(n), size if n > 1 else 0)
                for n, line in ((inside, self.inside), (hosts, self.between))
            )
        if kind in ("ppermute", "send"):
            return self._line(self.between if hosts > 1 else self.inside, 1, size)
        return 2 * self._seconds("all_gather", size, reach)

    def _half(self, n: int, size: float, line: Line) -> float:
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


_ONE_WAY = ("pbroadcast", "broadcast", "scatter", "gather", "reduce", "ppermute")
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}


def _readable(amount: float, unit: str) -> str:
    """Return an amount in a unit, or with a smaller prefix if it would be below 1.

    >>> _readable(3.35e12, "GB/s"), _readable(989e12, "TFLOP/s"), _readable(48.6e9, "TFLOP/s"), _readable(1, "GB")
    ('3350 GB/s', '989 TFLOP/s', '48.6 GFLOP/s', '1 B')
    """
    largest, rest = _PREFIXES[unit[0]], unit[1:]
    for prefix, size in _PREFIXES.items():
        if size <= min(largest, amount):
            number = amount / size
            return f"{number:.0f} {prefix}{rest}" if number >= 100 else f"{number:.3g} {prefix}{rest}"
    return f"{amount:.3g} {rest}"


def group_topology(mesh: Mesh, axes: Iterable[str], ranks_per_host: int) -> tuple[int, int]:
    """Return the ranks of a group on each host, and the number of hosts. The mesh's last axis varies fastest."""
    named, inside, stride = set(axes), 1, 1
    for name, size in reversed(mesh.shape.items()):
        if name in named:
            inside *= min(size, max(1, ranks_per_host // stride))
        stride *= size
    return inside, math.ceil(mesh.axis_size(named) / inside)


def hardware_of(hardware: Hardware | str) -> Hardware:
    if isinstance(hardware, str):
        return Hardware.named(hardware)
    if not isinstance(hardware, Hardware):
        raise TypeError(
            f"a price is for hardware known by name, such as 'h100', or an fp.Hardware(…), not {hardware!r}"
        )
    return hardware


# Peaks without sparsity from NVIDIA's data sheets (SXM). Float32 products run as in torch, without TF32. Links count
# one direction: NVLink of a rank, its share of a DGX's InfiniBand, and a PCIe slot with 16 lanes. Latencies per round
# are NCCL's (src/graph/tuning.cc: "simple", NVLink 3.4 µs and network 14 µs).
_NVLINK, _NETWORK = 3.4e-6, 14e-6
# a rank's eighth of the memory bandwidth of a DGX's two processors
_MAIN = {"h100": 77e9, "a100": 51e9, "v100": 32e9}


def _dgx(
    name: str, rates: tuple[float, ...], bandwidth: float, capacity: int, nvlink: float, network: float, host: float
) -> Hardware:
    flops = dict(zip((torch.float64, torch.float32, torch.float16, torch.bfloat16), rates, strict=False))
    links = Line(_NVLINK, 1 / nvlink), Line(_NETWORK, 1 / network)
    pcie, main = Line(10e-6, 1 / host), _MAIN[name]
    return Hardware(name, flops, bandwidth, capacity, 8, *links, host=pcie, host_bandwidth=main)


HARDWARE = {
    "h100": _dgx("h100", (67e12, 67e12, 989e12, 989e12), 3.35e12, 80 * 10**9, 450e9, 50e9, 64e9),
    "a100": _dgx("a100", (19.5e12, 19.5e12, 312e12, 312e12), 2.039e12, 80 * 10**9, 300e9, 25e9, 32e9),
    "v100": _dgx("v100", (7.8e12, 15.7e12, 125e12), 0.9e12, 32 * 10**9, 150e9, 6.25e9, 16e9),
}
