"""What every process of the tests sets on import: pytest's own, and the ranks of `processes`.

One thread, since kernels round by how they share out their work. And no deadlines: how long an example takes says more
about what else the machine does than about the example.
"""

import hypothesis
import torch

__all__: list[str] = []

torch.set_num_threads(1)
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")
