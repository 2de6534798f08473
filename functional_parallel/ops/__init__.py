"""Library ops other than collectives. Each file has schema, kernel, derivative and sharding rule of an op or family."""

from . import attention, ctc, grouped, keyed_draws  # their imports register their ops
from .adamw_kernel import ADAMW, ADAMW_IN_PLACE, adamw_formula, adamw_of_one
from .attention_kernels import attention_notes
from .block_quantiser import IDENTITY, WIRE_FORMATS, BlockFormat, block_format
from .constrain import OP as CONSTRAIN
from .constrain import constrain, refuse_idle
from .disk_blocks import is_on_disk
from .marks import define_marker
from .outputs import OP as OUTPUTS
from .outputs import outputs
from .packing import PACK, SLICE_SCATTER_IN_PLACE, UNPACK, UNPACK_INTO, packed, run_of, unpacked
from .sent_errors import NEW_ERROR, UNSENT, WITH_ERROR
from .squares import sum_of_squares
from .to_memory import (
    MEMORIES,
    MOVE_INTO,
    TO_MEMORY,
    NumberBeside,
    copy_beside,
    copy_into,
    device_of_memory,
    disk,
    is_move,
    is_number,
    kind_of_memory,
    memory_after,
    memory_now,
    moved_value,
    require_memory,
    room_for,
    to_device,
    to_memory,
)
from .wire import DEQUANTISE, DEQUANTISE_SUM, QUANTISE, wire_bytes
