"""Times of all requests of a coordinator, in histograms."""

from __future__ import annotations

from outrider.readings import REQUEST_SECONDS, STAGE_SECONDS, TOKEN_SECONDS, Histogram, Reading

StageHistograms = dict[str, Histogram]
"""Times of the stages of steps, in seconds."""


def _of_stages() -> StageHistograms:
    return {stage: Histogram(STAGE_SECONDS) for stage in ("draft", "score", "accept", "wire")}


class LatencyHistograms:
    """Histograms of stopwatches, in seconds."""

    def __init__(self) -> None:
        self.queue = Histogram(REQUEST_SECONDS)
        self.first_token = Histogram(REQUEST_SECONDS)
        self.whole = Histogram(REQUEST_SECONDS)
        self.per_token = Histogram(TOKEN_SECONDS)
        self.between_tokens = Histogram(TOKEN_SECONDS)
        self.prefill = _of_stages()
        """Steps in which the target takes in the whole text: the first of a request, and those of a rebuild."""
        self.decode = _of_stages()
        """All other steps."""
        self.num_drafts_ahead = 0
        """Proposals that were begun before they were asked for."""

    def readings(self) -> list[Reading]:
        """All of it."""
        return [
            Reading("outrider_request_queue_time_seconds", self.queue.read()),
            Reading("outrider_time_to_first_token_seconds", self.first_token.read()),
            Reading("outrider_e2e_request_latency_seconds", self.whole.read()),
            Reading("outrider_request_time_per_output_token_seconds", self.per_token.read()),
            Reading("outrider_inter_token_latency_seconds", self.between_tokens.read()),
            *[
                Reading("outrider_step_stage_seconds", histogram.read(), (("phase", phase), ("stage", stage)))
                for phase, stages in (("prefill", self.prefill), ("decode", self.decode))
                for stage, histogram in stages.items()
            ],
            Reading("outrider_drafts_ahead_total", self.num_drafts_ahead),
        ]
