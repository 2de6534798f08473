"""What every process of the tests sets on import: pytest's own, and the ranks of `processes`.

One thread, since kernels round by how they share out their work. No deadlines: how long an example takes says more
about what else the machine does than about the example. And 20 examples of a law, not 100: they are others in each run.
"""

import hypothesis
import torch

__all__: list[str] = []

torch.set_num_threads(1)
hypothesis.settings.register_profile("tests", deadline=None, max_examples=20)
hypothesis.settings.load_profile("tests")
