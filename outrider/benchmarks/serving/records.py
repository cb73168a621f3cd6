"""Records of a load: one for each request, as its caller saw it; a request that failed is a record too."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.benchmarks.samples import ratio
from outrider.generation import GenerationResult


@dataclass(frozen=True, slots=True)
class Record:
    """One request as its caller saw it. Times are seconds since the run began."""

    num_prompt_tokens: int
    sent_at: float
    ended_at: float
    token_times: tuple[float, ...] = ()
    """Arrival times of the messages with tokens."""
    token_counts: tuple[int, ...] = ()
    """Number of tokens of each message."""
    result: GenerationResult | None = None
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return sum(self.token_counts)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from sending to the first token; None without any."""
        return self.token_times[0] - self.sent_at if self.token_times else None

    @property
    def latency(self) -> float:
        """Seconds from sending to the end."""
        return self.ended_at - self.sent_at

    @property
    def time_per_output_token(self) -> float | None:
        """(last - first) / (tokens - 1), from the times of the messages; None with fewer than two tokens."""
        if self.num_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_tokens - 1)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Inter-token latencies: gaps between one message with tokens and the next."""
        return tuple(later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of one go."""

    records: tuple[Record, ...]
    """Records in the order of the prompts."""
    duration: float
    """Seconds until the last request had ended."""
    num_users: int = 1
    """Most requests under way at a time, as asked for."""
    client_load: float = 0.0
    """Processor time of the busiest client process over the duration; near 1 the client itself limits the figures."""
    first_tokens_duration: float | None = None
    """Seconds until the same requests had ended with one token each, where that was measured."""

    @property
    def completed(self) -> tuple[Record, ...]:
        """Requests that completed."""
        return tuple(record for record in self.records if record.result is not None)

    @property
    def num_tokens(self) -> int:
        """Output tokens of the completed requests."""
        return sum(record.num_tokens for record in self.completed)

    @property
    def output_throughput(self) -> float:
        """Output tokens a second, of all requests together."""
        return self.num_tokens / self.duration

    @property
    def time_per_token_until_all_finished(self) -> float | None:
        """Seconds until the last request had ended, prefill included, by the output tokens of one user."""
        return ratio(self.duration * self.num_users, self.num_tokens)

    @property
    def time_per_token_after_the_first(self) -> float | None:
        """The same without the time that the first tokens alone took, by the tokens after them."""
        if self.first_tokens_duration is None:
            return None
        decoding = self.duration - self.first_tokens_duration
        return ratio(decoding * self.num_users, self.num_tokens - len(self.completed))
