"""Draft heads that read the target's hidden states and keep a KV cache: made on their device, loaded, given pages.

The heads are those of ``outrider.model_executor.draft_heads``; ``head_executor`` keeps sessions up to date. EAGLE-2
draws trees with the head of EAGLE-1; drafts are one sequence of tokens here. MTP is a layer of the target's own
checkpoint (MiMo-7B). Sources: Li et al., "EAGLE", 2024, and "EAGLE-3", 2025; Chen et al., "DFlash", 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from outrider import __version__
from outrider.config import DraftSettings
from outrider.config.fields import DraftMethod
from outrider.kv_cache.sizing import KVCacheRequest
from outrider.model_executor.cost_profile import profile_head
from outrider.model_executor.device_lock import device_lock
from outrider.model_executor.device_setup import device_facts, prepare_device, resolve_device
from outrider.model_executor.distributed.runner import drafting_rules, graph_limits
from outrider.model_executor.draft_heads.block_runner import BlockRunner
from outrider.model_executor.draft_heads.config import read_eagle3_config
from outrider.model_executor.draft_heads.contract import DraftHead, HeadConfig
from outrider.model_executor.draft_heads.dflash import DFlashHead
from outrider.model_executor.draft_heads.dflash_config import read_dflash_config
from outrider.model_executor.draft_heads.eagle import EagleHead, read_eagle_config
from outrider.model_executor.draft_heads.eagle3 import Eagle3Head
from outrider.model_executor.draft_heads.loading import load_head
from outrider.model_executor.draft_heads.mtp import MtpHead, read_mtp_config
from outrider.model_executor.draft_heads.runner import DraftHeadRunner
from outrider.model_executor.kv_cache_sizing import choose_num_pages, explaining_out_of_memory
from outrider.model_executor.loader.description import mark_of
from outrider.model_executor.loader.model import choose_length
from outrider.model_executor.loader.tokenizer_files import read_tokenizer
from outrider.types import ModelDescription
from outrider_draft.proposers.dflash import BlockExecutor
from outrider_draft.proposers.head_executor import HeadExecutor
from outrider_draft.proposers.registry import LoadHooks, ServedProposer

ConfigT = TypeVar("ConfigT", bound=HeadConfig)


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """The head of the settings' method, on its device."""
    folder, target_folder = Path(settings.model or ""), Path(settings.target_model or "")
    serve = partial(_load_served, settings, hooks, folder=folder)
    match settings.method:
        case DraftMethod.EAGLE:
            return serve(config=read_eagle_config(folder, target_folder), make=EagleHead, architecture="Eagle")
        case DraftMethod.EAGLE3:
            return serve(config=read_eagle3_config(folder, target_folder), make=Eagle3Head, architecture="Eagle3")
        case DraftMethod.DFLASH:
            return serve(
                config=read_dflash_config(folder, target_folder), make=DFlashHead, architecture="DFlash",
                make_runner=BlockRunner, make_executor=BlockExecutor,
            )  # fmt: skip
        case _:
            config = read_mtp_config(target_folder)
            return serve(folder=target_folder, config=config, make=MtpHead, architecture="MTP")


def _load_served(
    settings: DraftSettings,
    hooks: LoadHooks,
    *,
    config: ConfigT,
    make: Callable[..., DraftHead],
    folder: Path,
    architecture: str,
    make_runner: Callable[..., DraftHeadRunner] = DraftHeadRunner,
    make_executor: Callable[[Any], HeadExecutor] = HeadExecutor,
) -> ServedProposer:
    """The head that ``make(config, dtype=, device=)`` gives, filled from ``folder``, on the settings' device."""
    target_folder = Path(settings.target_model or "")
    device, dtype = _placed(settings, config)
    length = choose_length(config.layer, settings.max_model_len)
    with torch.inference_mode(), explaining_out_of_memory(device):
        head = make(config, dtype=dtype, device=device)
        load_head(head, folder, target_folder, hooks.progress)
        bytes_per_token = head.kv_cache_layout.bytes_per_token(dtype.itemsize)
        request = KVCacheRequest(
            settings.page_size, length, bytes_per_token, settings.num_pages, settings.kv_cache_bytes,
            settings.gpu_memory_utilization, settings.max_running_requests,
        )  # fmt: skip
        runner = make_runner(
            head,
            num_pages=choose_num_pages(request, device),
            page_size=settings.page_size,
            max_model_len=length,
            rules=drafting_rules(settings),
            prefix_caching=settings.prefix_caching,
            graphs=graph_limits(settings),
        )
        device_id = device_facts(device)["device_id"]
        with device_lock(device_id, is_shared=True):
            runner.capture(hooks.capture_progress)
        with device_lock(device_id):
            costs = profile_head(runner, max_length=settings.num_speculative_tokens, bound_s=settings.cost_profile_s)
    name = (settings.served_model_name or folder.resolve().name) + mark_of(folder)
    served = _served(make_executor(runner), name, target_folder, architecture)
    return replace(served, description=replace(served.description, step_costs=costs))


def _placed(settings: DraftSettings, config: HeadConfig) -> tuple[torch.device, torch.dtype]:
    device = torch.device(resolve_device(settings.device))
    named = prepare_device(str(device), settings.dtype, settings.num_threads)
    found: Any = config.layer.dtype if named == "auto" else getattr(torch, named)
    return device, found


def _served(executor: HeadExecutor, name: str, target_folder: Path, architecture: str) -> ServedProposer:
    """Served proposer of a loaded head; ids are those of the target's tokenizer."""
    runner = executor.runner
    config, pool = runner.head.config, runner.sequences.pool
    tokenizer = read_tokenizer(target_folder, vocab_size=config.layer.vocab_size)
    description = ModelDescription(
        role="draft",
        model_name=name,
        architecture=architecture,
        vocab_size=config.layer.vocab_size,
        num_token_ids=tokenizer.num_token_ids or config.layer.vocab_size,
        max_model_len=runner.max_model_len,
        dtype=str(runner.head.dtype).removeprefix("torch."),
        **device_facts(runner.device),
        page_size=runner.page_size,
        num_pages=pool.num_pages,
        tokenizer_files=tokenizer.files,
        tokenizer_hash=tokenizer.sha256,
        version=__version__,
        hidden_size=config.target_hidden_size,
        hidden_state_layers=config.hidden_state_layers,
    )
    return ServedProposer(
        executor,
        executor.sequences,
        description,
        max_cached_tokens=pool.num_pages * pool.page_size,
        prefix_cache=runner.sequences.prefix_cache,
    )
