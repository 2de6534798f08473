"""Errors of this package, with one base class."""

from __future__ import annotations

__all__ = ["Error", "MeshError", "SpecError", "SpecWarning"]


class Error(Exception):
    """Base class of the errors of this package, and of packages that use it."""


class MeshError(Error, ValueError):
    """Raised for an invalid mesh, or for an axis or rank that a mesh does not have."""


class SpecError(Error, ValueError):
    """Raised for specs that cannot be read or do not fit their tensors. The message lists all of them."""


class SpecWarning(UserWarning):
    """Issued for rules that leave parameters replicated which they could be expected to split."""
