"""Builds everything a worker needs on its device, in the fixed order of construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from ...streams.host_lane import HostLane
from ...streams.staging import StagingRing
from ..loader.model_config import ModelConfig
from ..sampling.sampler import Sampler
from ..worker import WorkerLimits
from .model_runner import ModelRunner
from .page_canary import PageCanary
from .placement import Placement
from .row_samplings import RowSamplings
from .torch_step import TorchParts, TorchStep

if TYPE_CHECKING:
    from ...streams.lane import Lane
    from ...streams.staging import Slot
    from ..config import EngineConfig
    from ..scheduler.schedule_batch import ScheduleBatch
    from .step_parts import Stage
    from .tp_worker import DeviceStep

# A slot holds any usual step; one that needs more (very many pages at once) gets memory of its own.
_MAX_SLOT_BYTES: Final = 8 << 20
_INT_BYTES: Final = 4

MakeStep = Callable[["ScheduleBatch", "Slot"], "DeviceStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBuild:
    """What exists once the worker has started."""

    make_step: MakeStep
    ring: StagingRing
    compute: Lane
    copy: Lane
    limits: WorkerLimits
    canary: PageCanary
    num_forwards: Counter[str]  # by the runner that computed them
    release: Callable[[], None] = lambda: None  # before the last reference goes: what refers to itself lets go

    @classmethod
    def make_blocking(cls, config: EngineConfig, folder: Path, num_ids: int | None = None) -> DeviceBuild:
        """Load and allocate. `num_ids` as `TpWorker` has it. Raises ConfigError."""
        model_config = ModelConfig.from_folder(folder, max_model_len=config.max_model_len)
        placement = Placement.resolve(config, model_config)
        runner = ModelRunner.build_blocking(config, model_config, folder, placement)
        num_ids = min(num_ids or model_config.vocab_size, model_config.vocab_size)
        num_rows = config.max_running_requests
        num_ints = 16 * (num_rows + 1) + config.max_prefill_tokens + 3 * num_rows * runner.memory.max_pages_per_row
        result_bytes = 16 * num_rows + 4096
        slot_bytes = min(num_ints * _INT_BYTES, _MAX_SLOT_BYTES) + 2 * result_bytes
        pinned = placement.device.type == "cuda"
        stage = _stage_into(slot_bytes - result_bytes, pinned=pinned)
        ring = StagingRing(slot_bytes, pinned=pinned)
        if pinned:
            return _on_cuda(config, runner, placement, stage, ring, num_ids)
        return _on_cpu(config, runner, placement, stage, ring, num_ids)


def _limits(
    config: EngineConfig, runner: ModelRunner, *, memory_table: str, counts_tokens: bool = False
) -> WorkerLimits:
    memory = runner.memory
    return WorkerLimits(
        num_pages=memory.num_pages,
        page_size=memory.page_size,
        num_rows=config.max_running_requests,
        max_model_len=memory.max_model_len,
        vocab_size=runner.model.config.vocab_size,
        counts_tokens=counts_tokens,
        memory_table=memory_table,
    )


def _stage_into(usable_bytes: int, *, pinned: bool) -> Stage:
    """Copies packed bytes, as int32, into the step's slot, or, beyond any usual step, into memory of their own."""

    def stage(slot: Slot, packed: bytes | bytearray) -> torch.Tensor:
        num_bytes = len(packed)
        if not num_bytes:
            return torch.empty(0, dtype=torch.int32)
        shape = (num_bytes // _INT_BYTES,)
        if slot.used_bytes + num_bytes <= usable_bytes:
            staged = slot.take(shape, torch.int32)
        else:
            staged = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
        # bytearray: torch warns about memory that it could not write to.
        return staged.copy_(torch.frombuffer(bytearray(packed), dtype=torch.int32))

    return stage


def _on_cpu(
    config: EngineConfig, runner: ModelRunner, placement: Placement, stage: Stage, ring: StagingRing, num_ids: int
) -> DeviceBuild:
    """One thread is both lanes: there is nothing to copy between."""
    memory = runner.memory
    limits = _limits(config, runner, memory_table=f"KV pool {memory.pool_bytes / 2**20:,.0f} MiB, taken as it fills")
    parts = TorchParts(
        runner=runner,
        sampler=Sampler(num_ids, placement.device, row_invariant=config.row_invariant),
        samplings=RowSamplings(),
        vocab_size=limits.vocab_size,
        device=placement.device,
        stage=stage,
    )
    lane = HostLane("compute")
    # On the thread that computes: OpenMP keeps the number by thread.
    lane.submit(lambda: torch.set_num_threads(placement.num_threads))
    return DeviceBuild(
        make_step=lambda batch, slot: TorchStep(parts, batch, slot),
        ring=ring,
        compute=lane,
        copy=lane,
        limits=limits,
        canary=PageCanary(runner.kv_pool, lane),
        num_forwards=runner.num_forwards,
    )


def _on_cuda(
    config: EngineConfig, runner: ModelRunner, placement: Placement, stage: Stage, ring: StagingRing, num_ids: int
) -> DeviceBuild:
    """Two streams, a sampler of kernels, and graphs for what can be captured."""
    from ...streams.cuda_lane import CudaLane
    from ...streams.stream_ring import distinct_streams
    from .cuda_step import CudaStep
    from .graph_build import build_cuda_parts

    device = placement.device
    parts = build_cuda_parts(config, runner, device, stage, num_ids=num_ids)
    compute_stream, copy_stream = distinct_streams(2, device)
    compute = CudaLane("compute", device, stream=compute_stream)
    return DeviceBuild(
        make_step=lambda batch, slot: CudaStep(parts, batch, slot),
        ring=ring,
        compute=compute,
        copy=CudaLane("copy", device, stream=copy_stream),
        limits=_limits(config, parts.runner, memory_table=parts.memory_table, counts_tokens=True),
        canary=PageCanary(parts.runner.kv_pool, compute),
        num_forwards=parts.runner.num_forwards,
        release=parts.release,
    )
