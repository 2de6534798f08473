"""Peers that are packages of their own: compared with where they are installed, left out where they are not."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["PACKAGES", "missing"]

PACKAGES = {"DeepSpeed": "deepspeed", "JAX": "jax"}
_INSTALLED_BY = {"deepspeed": "pip install wheel && pip install --no-build-isolation deepspeed"}  # it builds with torch


def missing(name: str) -> str | None:
    """How to install the package that a peer needs and that is not here; None when there is nothing to install."""
    package = PACKAGES.get(name.split()[0])
    if package is None or find_spec(package):
        return None
    return f"{package} is not installed: {_INSTALLED_BY.get(package, f'pip install {package}')}"
