"""Collectives through memory shared by the ranks of one host."""

from . import shared
from .channels import Channels
from .memory import SharedMemory
from .rendezvous import connect, host_identity
