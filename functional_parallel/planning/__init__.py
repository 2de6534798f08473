"""Memory estimates of training, the search for a pipeline, and device maps."""

from .device_map import DeviceMap, MapRow, device_map
from .estimate import CONVENTIONS, activation_bytes, estimate
from .pipeline_search import PipelineChoice, PipelineChoices, layer_costs, search_pipeline
