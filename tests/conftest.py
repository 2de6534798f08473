"""One thread per process, as the ranks of `tests/processes.py` have: kernels round by how they share out their work."""

import torch

torch.set_num_threads(1)
