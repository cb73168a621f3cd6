"""Several draft tokens in one launch: forwards and draws in turn on the device, the host asked for nothing between.

``rows`` says what a row is, ``plan`` lays a launch out as one buffer of numbers,
``loop`` runs it, ``results`` reads what came of it.
"""

from outrider.model_executor.draft_loop.rows import (
    MAX_STEPS,
    MAX_UNCOMPUTED_TOKENS,
    DraftMetadata,
    DraftRow,
    check_draft_rows,
)
from outrider.sampling.support import DraftingRules

__all__ = ["MAX_UNCOMPUTED_TOKENS", "MAX_STEPS", "DraftRow", "DraftMetadata", "DraftingRules", "check_draft_rows"]
