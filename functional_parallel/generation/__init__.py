"""Generation: text from causal models with a cache of keys and values that stays on the ranks."""

from . import folder_command
from .cached_model import CachedModel, FunctionWithCache, cached_model
from .continuous_batch import ContinuousBatch
from .generate import Generated, Generator, generate
from .sampling import Sampling
from .serving import serving_plan

__all__ = [
    "CachedModel",
    "ContinuousBatch",
    "FunctionWithCache",
    "Generated",
    "Generator",
    "Sampling",
    "cached_model",
    "folder_command",
    "generate",
    "serving_plan",
]
