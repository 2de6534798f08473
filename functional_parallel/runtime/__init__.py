"""Runtimes of programs: all ranks simulated in this process, or one rank here and its peers in other processes."""

from .calls import CURRENT, CallLog, GroupWaits, NamedWait, PendingCollective, Waitable, is_ahead, note_step, rank_name
from .default import default_runtime, is_main_rank, rank, refuse_asynchronous, runtime_of, use_runtime, world_size
from .execution import Origin, Writer, check_backend
from .handles import (
    PendingMove,
    PipelineValue,
    arrived,
    copy_if_aliased,
    device_of,
    is_simulated,
    moved_to,
    storages,
    to_device,
)
from .interface import Runtime, Where
from .joined import cat_or_view
from .launch import launch
from .launchers import launch_of_environment
from .pipelined import PipelineRuntime
from .processes import (
    ALGORITHM_VARIABLE,
    COMPLETED,
    GATHERED,
    TRANSPORTS,
    Axes,
    AxisGroup,
    Messages,
    ProcessCommunicator,
    ProcessRuntime,
    RankProgram,
    Readers,
    Transport,
    communicator,
)
from .simulated import SimulatedRuntime
from .watch import host_identity, keep_alive, own_addresses
