"""Sites of random draws: the ambient keys of a thread, and the numbers of draws from them.

A trace has the number of a site as a constant. A recording knows which constants these are, because the draws of a
repeated call have other numbers than the draws of the first call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import _torch
from .record import recorder


@dataclass
class AmbientKey:
    key: torch.Tensor
    in_program: bool  # whether it was set inside a function with a cached trace
    drawn: int = 0  # number of sites so far

    def next_site(self) -> int | torch.Tensor:
        """Return the number of the next site: in a trace, the constant that holds it."""
        number, self.drawn = self.drawn, self.drawn + 1
        active = recorder()
        if active is None:
            return number
        constant = torch.as_tensor(number, dtype=torch.int64, device=self.key.device)
        active.sites[active.node_of(_torch.unwrap(constant))] = self, number
        return constant


def ambient_keys() -> list[AmbientKey]:
    return _torch.of_thread("random", list[AmbientKey])  # innermost last
