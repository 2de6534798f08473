"""Asynchronous training: ranks that do not wait for each other. Convergence suffers; see docs/asynchronous.md."""

from .async_state import AsyncMetrics, AsyncState
from .async_step import AsyncStep
from .clock import Clock
from .servers import parameter_server, rotating_server

__all__ = ["AsyncMetrics", "AsyncState", "AsyncStep", "Clock", "parameter_server", "rotating_server"]
