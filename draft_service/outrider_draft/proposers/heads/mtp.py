"""MTP: drafts with a layer for multi-token prediction that the target's own checkpoint holds (MiMo-7B).

The layer is ``outrider.model_executor.draft_heads.mtp``'s, how sessions are kept up to date ``head_executor``'s.
"""

from __future__ import annotations

from pathlib import Path

from outrider.config import DraftSettings
from outrider.model_executor.draft_heads.mtp import MtpHead, read_mtp_config
from outrider_draft.proposers.heads.serving import load_served
from outrider_draft.proposers.registry import LoadHooks, ServedProposer


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """The layer of the target's folder, on the draft's device."""
    folder = Path(settings.target_model or "")
    config = read_mtp_config(folder)
    return load_served(settings, hooks, config=config, make=MtpHead, folder=folder, architecture="MTP")
