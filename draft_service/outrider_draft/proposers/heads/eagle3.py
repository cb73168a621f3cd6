"""EAGLE-3: drafts with one layer over the states of three of the target's layers.

Source: Li et al., "EAGLE-3", 2025. The head is ``outrider.model_executor.draft_heads.eagle3``'s, how sessions are kept
up to date ``head_executor``'s.
"""

from __future__ import annotations

from pathlib import Path

from outrider.config import DraftSettings
from outrider.model_executor.draft_heads.config import read_eagle3_config
from outrider.model_executor.draft_heads.eagle3 import Eagle3Head
from outrider_draft.proposers.heads.serving import load_served
from outrider_draft.proposers.registry import LoadHooks, ServedProposer


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """A head on its device."""
    folder = Path(settings.model or "")
    config = read_eagle3_config(folder, Path(settings.target_model or ""))
    return load_served(settings, hooks, config=config, make=Eagle3Head, folder=folder, architecture="Eagle3")
