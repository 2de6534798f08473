"""Tests on a CUDA device, where there is one. Each file runs in one process, so that several share the work."""
