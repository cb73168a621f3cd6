"""Paged executor: an executor whose jobs write to sequences of one KV cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from outrider.kv_cache import KVCacheManager, KVSequence
from outrider.serving.executor import EventT, Executor, ItemT, JobT
from outrider.serving.session import SequenceT


class PagedExecutor(Executor[SequenceT, ItemT, JobT, EventT]):
    """Counts the KV pages of jobs."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache

    @abstractmethod
    def kv_of(self, job: JobT) -> KVSequence | None:
        """The sequence to which a job writes; None if it writes nothing."""

    def num_written(self, job: JobT, num_tokens: int) -> int:
        """Tokens that a forward over this many of a job's tokens writes, those written in advance included."""
        return num_tokens

    @property
    def num_pages_free(self) -> int:
        """KV pages that are free."""
        return self._kv_cache.num_free

    @property
    def num_pages_unused(self) -> int:
        """Unused pages among all KV pages."""
        return self._kv_cache.num_pages_free

    def num_pages_needed(self, job: JobT, num_tokens: int) -> int:
        """Free KV pages for what a forward over this many of the job's tokens writes."""
        kv = self.kv_of(job)
        return 0 if kv is None else self._kv_cache.pages_needed(kv, self.num_written(job, num_tokens))

    def fits(self, batch: Sequence[tuple[JobT, int]]) -> bool:
        """True if there are free KV pages for this many tokens of each job."""
        rows = [(self.kv_of(job), self.num_written(job, num_tokens)) for job, num_tokens in batch]
        return self._kv_cache.fit((kv, count) for kv, count in rows if kv is not None)

    def fits_alone(self, job: JobT) -> bool:
        """True if there are pages for all that the job writes, chunk by chunk."""
        kv = self.kv_of(job)
        return kv is None or self._kv_cache.fits_alone(kv, self.num_written(job, job.num_left))
