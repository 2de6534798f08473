"""One thread per process, as the ranks of `tests/processes.py` have: kernels round by how they share out their work.

And no deadlines: how long an example takes says more about what else the machine does than about the example.
"""

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")
