"""Runtimes of programs: all ranks simulated in this process, or one rank here and its peers in other processes."""

from .calls import note_step, rank_name
from .default import default_runtime, is_main_rank, rank, refuse_asynchronous, runtime_of, use_runtime, world_size
from .execution import Origin, check_backend
from .handles import PipelineValue, copy_if_aliased, device_of, moved_to, runtime_kind_of, storages, to_device
from .interface import Runtime, Where
from .launch import launch
from .launchers import launch_of_environment
from .pipelined import PipelineRuntime
from .processes import ProcessRuntime
from .shared_memory import host_identity
from .simulated import SimulatedRuntime
from .watch import keep_alive, own_addresses
