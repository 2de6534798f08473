"""Python functions of programs, with compiled regions, and CUDA graphs."""

from .codegen import Writer
from .cuda_graphs import CapturedFunction
from .inductor import check_backend
from .origins import Log, Origin, Recorded
from .regions import with_regions
