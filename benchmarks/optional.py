"""Peers that are packages of their own: compared with where they are installed, left out where they are not."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["PACKAGES", "missing"]

PACKAGES = {"DeepSpeed": "deepspeed", "JAX": "jax"}


def missing(name: str) -> str | None:
    """How to install the package that a peer needs and that is not here; None when there is nothing to install."""
    package = PACKAGES.get(name.split()[0])
    return None if package is None or find_spec(package) else f"pip install {package} to compare with it"
