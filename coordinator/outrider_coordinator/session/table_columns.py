"""Columns of ``SessionTable.values``, and the bits of the column ``FLAGS``. Imported as ``col``.

Columns that are written together lie together. Generations begin at 1; 0 is none.
"""

(
    NUMBER, STATUS, REASON, FLAGS, LIMIT, SEED, LAST, REMAINING, LENGTH, TARGET_HELD, STEP, GENERATION,
    TARGET_LOSSES, TARGET_ASKED, NUM_DRAFTED, ANNOUNCED, DRAFT_ASKED, DRAFT_BASE, DRAFT_LENGTH, DRAFT_LOSSES, CREDIT,
    NUM_PLAIN, DRAFT_HELD, DRAFT_OPENED, PROPOSAL_OPENED, CAPACITY,
) = range(26)  # fmt: skip
"""``LAST``: newest committed token. ``REASON``: index of a ``WithoutDraft``. ``LIMIT``: of token ids. ``CAPACITY``: of
the draft, in tokens. ``ANNOUNCED``: generation of the ``ScoreAhead`` that was sent. ``SEED``: bits of an unsigned
number.
"""
NUM_COLUMNS = 26

(
    PAUSED, HAS_PART, IS_LATE, READS_STATES, IS_SPARSE, IS_SLOW, HAS_GRAMMAR, CLAIMS,
) = (1 << bit for bit in range(8))  # fmt: skip
"""Bits of ``FLAGS``. ``IS_SPARSE``: form of the evidence. ``IS_SLOW``: judged neither by tokens nor
by sparse rejection token by token, or in need of prompt logprobs alone. ``HAS_GRAMMAR``: tokens are checked.
``CLAIMS``: the target was asked for a step that it had begun by itself."""
DRAFT_READINESS, TARGET_READINESS = 8, 10
"""First of the two bits of ``FLAGS`` that hold an index of ``Readiness``; 0 is open."""
