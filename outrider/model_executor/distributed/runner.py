"""A service's model, alone or shared: what rank 0 opens, and what every other rank does all its life.

Owns the way from a section of settings to either. Rank 0 starts the others with the same settings unless torchrun did.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import torch

from outrider.config import DraftSettings, TargetSettings, service_module, to_argv
from outrider.config.fields import DraftSampleMethod
from outrider.config.schema.model_service import max_batched_tokens
from outrider.errors import ConfigError
from outrider.kernels.device_stream import Mark
from outrider.model_executor.device_setup import prepare_device, resolve_device
from outrider.model_executor.distributed.heartbeats import Heartbeats
from outrider.model_executor.distributed.process_group import Follower, Leader, OnFailure
from outrider.model_executor.distributed.rank_info import RankInfo, find_rank
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.graph_shapes import GraphLimits
from outrider.model_executor.kv_calibration import measure_kv_scales
from outrider.model_executor.loader.model import LoadOptions, Ranks, with_parallel_experts
from outrider.model_executor.loader.weights import Progress
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.models import AttentionWindow, read_model_config
from outrider.model_executor.worker import Worker
from outrider.model_executor.worker_commands import Operation
from outrider.types import LAST_HIDDEN_STATE

Settings = TargetSettings | DraftSettings


def open_runner(
    settings: Settings,
    *,
    progress: Progress | None = None,
    on_failure: OnFailure | None = None,
) -> ModelRunner:
    """Load the model that the settings name; ``ModelError`` or ``ConfigError`` says why it cannot be served.

    ``on_failure`` is called when a rank that shares the model is lost; the process ends soon after.
    """
    place = find_rank(settings.tensor_parallel_size)
    settings = _with_device(settings)
    device = device_of(settings.device, place.local_rank)
    dtype = prepare_device(device, settings.dtype, _num_threads(settings))
    if place.size == 1:
        return _load(settings, _load_options(settings, device, dtype, progress=progress))
    config = read_model_config(Path(settings.model or ""), settings.model_impl)
    Shard(0, place.size).check(with_parallel_experts(config) if settings.enable_expert_parallel else config)
    if not place.is_started:
        prepare_device(device_of(settings.device, place.size - 1), settings.dtype, _num_threads(settings))
    captured_layers(settings)  # before any other process starts
    command = ("-P", "-m", service_module(settings.name), *to_argv(settings))
    leader = Leader(place, torch.device(device), command, on_failure, one_shot=settings.one_shot_all_reduce)
    try:
        return _load(settings, _load_options(settings, device, dtype, ranks=leader, progress=progress))
    except BaseException:
        leader.abandon()
        raise


def follow_model(settings: Settings, place: RankInfo) -> None:
    """Load this rank's part and run what rank 0 says, until it says no more."""
    settings = _with_device(settings)
    device = device_of(settings.device, place.local_rank)
    dtype = prepare_device(device, settings.dtype, _num_threads(settings))
    follower = Follower(place, torch.device(device), one_shot=settings.one_shot_all_reduce)
    try:
        options = _load_options(settings, device, dtype, ranks=follower)
        worker = Worker.load(
            settings.model or "",
            drafting=_drafting(settings),
            graphs=graph_limits(settings),
            hidden_state_layers=captured_layers(settings),
            **options,
        )
        if settings.kv_cache_scales == "measured":
            measure_kv_scales(worker, follower)
        with torch.inference_mode():
            run_commands(follower, worker)
    except BaseException as error:
        follower.heartbeats.report_failure(f"{type(error).__name__}: {error}")
        raise
    follower.close()


def run_commands(follower: Follower, worker: Worker) -> None:
    """Queue each command behind the one before, as rank 0 does, without waiting for the device."""
    steps = QueuedSteps(follower.heartbeats)
    while (command := follower.next_command(steps.are_left)) is not None:
        worker.run(command)
        if command.operation != Operation.COPY_PAGES:
            steps.add(worker.mark())
    worker.wait()


class QueuedSteps:
    """Steps on this rank's device; those that it has finished are counted for the heartbeats."""

    def __init__(self, heartbeats: Heartbeats) -> None:
        self._heartbeats = heartbeats
        self._marks: deque[Mark] = deque()

    def add(self, mark: Mark) -> None:
        """Add the step before ``mark``."""
        self._marks.append(mark)

    def are_left(self) -> bool:
        """True if any is unfinished."""
        while self._marks and self._marks[0].is_reached():
            self._marks.popleft()
            self._heartbeats.num_finished += 1
        return bool(self._marks)


def _with_device(settings: Settings) -> Settings:
    """The settings without "auto"; ``ConfigError`` where they ask for more than the device has."""
    device = resolve_device(settings.device, settings.tensor_parallel_size)
    if settings.gpu_memory_utilization is not None and device == "cpu":
        raise ConfigError("gpu_memory_utilization", "is set, and torch finds no GPU: give kv_cache_bytes on a CPU")
    return settings.model_copy(update={"device": device})


def device_of(device: str, local_rank: int) -> str:
    """The device of a rank: ranks of one host take one GPU after the other, from the one that is named."""
    chosen = torch.device(device)
    return f"cuda:{(chosen.index or 0) + local_rank}" if chosen.type == "cuda" else device


def _num_threads(settings: Settings) -> int | None:
    """Ranks on one processor share its cores."""
    if settings.num_threads is not None or settings.tensor_parallel_size == 1:
        return settings.num_threads
    return max(1, (os.cpu_count() or 1) // settings.tensor_parallel_size)


def _drafting(settings: Settings) -> DraftingRules | None:
    return drafting_rules(settings) if isinstance(settings, DraftSettings) else None


def drafting_rules(settings: DraftSettings) -> DraftingRules:
    """Draft sampling rules of the settings."""
    return DraftingRules(
        settings.support_mass,
        settings.support_limit,
        takes_argmax=settings.draft_sample_method is DraftSampleMethod.GREEDY,
    )


def graph_limits(settings: Settings) -> GraphLimits:
    """Limits of the CUDA graphs under these settings. The coverage is logged after capture."""
    memory_mb = settings.cuda_graph_memory_mb
    num_tokens = max_batched_tokens(settings.max_batched_tokens, is_gpu=True)
    return GraphLimits(
        max_sequences=settings.max_running_requests,
        max_draft_length=settings.num_speculative_tokens,
        max_tokens=min(settings.cuda_graph_max_tokens, num_tokens),
        max_batched_tokens=num_tokens,
        memory_bytes=None if memory_mb is None else memory_mb << 20,
        capture_seconds=settings.cuda_graph_capture_s,
        decodes=not isinstance(settings, DraftSettings),
    )


def captured_layers(settings: Settings) -> tuple[int, ...]:
    """Layers whose hidden states graphs hand out from the start; ``ConfigError`` for one that the model has not."""
    if not isinstance(settings, TargetSettings) or settings.hidden_state_layers is None:
        return ()
    layers = sorted({int(layer) for layer in settings.hidden_state_layers.split(",")})
    num_layers = read_model_config(Path(settings.model)).num_layers
    if layers[-1] > num_layers:
        raise ConfigError(
            "hidden_state_layers",
            f"names layer {layers[-1]}, and {settings.model} has states 0, the embedding, to {num_layers}, or"
            f" {LAST_HIDDEN_STATE} for what its head reads",
        )
    return tuple(layers)


def _load(settings: Settings, options: LoadOptions) -> ModelRunner:
    runner = ModelRunner.load(
        settings.model or "",
        drafting=_drafting(settings),
        graphs=graph_limits(settings),
        prefix_caching=settings.prefix_caching,
        snapshot_interval=settings.state_snapshot_interval,
        hidden_state_layers=captured_layers(settings),
        **options,
    )
    if settings.kv_cache_scales == "measured":
        measure_kv_scales(runner.worker, options["ranks"])
    return runner


def _load_options(
    settings: Settings, device: str, dtype: str, *, ranks: Ranks | None = None, progress: Progress | None = None
) -> LoadOptions:
    return {
        "device": device,
        "dtype": dtype,
        "page_size": settings.page_size,
        "num_pages": settings.num_pages,
        "kv_cache_bytes": settings.kv_cache_bytes,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_model_len": settings.max_model_len,
        "load_format": settings.load_format,
        "progress": progress,
        "ranks": ranks,
        "attention_window": _attention_window(settings),
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "model_impl": settings.model_impl,
        "batch_invariant": settings.batch_invariant,
        "enable_expert_parallel": settings.enable_expert_parallel,
    }


def _attention_window(settings: Settings) -> AttentionWindow | None:
    if not isinstance(settings, DraftSettings) or settings.attention_window is None:
        return None
    return AttentionWindow(settings.attention_window, settings.attention_sinks)
