"""DeepSpeed's ds_config.json as a plan, an optimizer and the options of a training step."""

from .config import Config, from_config

__all__ = ["Config", "from_config"]
