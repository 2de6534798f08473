"""Asynchronous training: ranks that do not wait for each other. Convergence suffers; see docs/asynchronous.md."""

from .clock import Clock
from .servers import parameter_server, rotating_server
from .state import AsyncMetrics, AsyncState
from .step import AsyncStep

__all__ = ["AsyncMetrics", "AsyncState", "AsyncStep", "Clock", "parameter_server", "rotating_server"]
