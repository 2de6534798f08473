"""Collectives through memory shared by the ranks of one host."""

from . import shared
from .channels import LARGEST, Channels
from .memory import SharedMemory
from .rendezvous import connect, host_identity

__all__ = ["LARGEST", "Channels", "SharedMemory", "connect", "host_identity", "shared"]
