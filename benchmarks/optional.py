"""Peers and models that are packages of their own: measured where they are installed, left out elsewhere."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["PACKAGES", "missing"]

PACKAGES = {"DeepSpeed": "deepspeed", "JAX": "jax", "Llama": "transformers"}
_INSTALLED_BY = {"deepspeed": "pip install wheel && pip install --no-build-isolation deepspeed"}  # it builds with torch


def missing(name: str) -> str | None:
    """Return how to install the package that a peer or a model needs; None if nothing is missing."""
    package = PACKAGES.get(name.split()[0])
    if package is None or find_spec(package):
        return None
    return f"{package} is not installed: {_INSTALLED_BY.get(package, f'pip install {package}')}"
