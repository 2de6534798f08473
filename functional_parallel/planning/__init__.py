"""Memory estimates of training, and the search for a pipeline."""

from .estimate import CONVENTIONS, activation_bytes, estimate
from .pipeline_search import PipelineChoice, PipelineChoices, layer_costs, search_pipeline
