"""Memory estimates of training, and the search for a pipeline."""

from .estimate import CONVENTIONS, activation_bytes, estimate
from .search import PipelineChoice, PipelineChoices, layer_costs, search_pipeline
