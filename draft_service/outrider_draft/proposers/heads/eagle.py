"""EAGLE (1 and 2): drafts with one layer over tokens and the target's last hidden states.

Source: Li et al., "EAGLE", 2024. The head is ``outrider.model_executor.draft_heads.eagle``'s, how sessions are kept up
to date ``head_executor``'s. EAGLE-2 draws trees with the same head; drafts are one sequence of tokens here.
"""

from __future__ import annotations

from pathlib import Path

from outrider.config import DraftSettings
from outrider.model_executor.draft_heads.eagle import EagleHead, read_eagle_config
from outrider_draft.proposers.heads.serving import load_served
from outrider_draft.proposers.registry import LoadHooks, ServedProposer


def load(settings: DraftSettings, hooks: LoadHooks) -> ServedProposer:
    """A head on its device."""
    folder = Path(settings.model or "")
    config = read_eagle_config(folder, Path(settings.target_model or ""))
    return load_served(settings, hooks, config=config, make=EagleHead, folder=folder, architecture="Eagle")
