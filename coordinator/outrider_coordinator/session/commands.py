"""Command builder of one session: commands from its request and tokens, each with a higher generation than the last."""

from __future__ import annotations

from outrider.ports import Extend, Open, Prepare, Release, Score
from outrider.types import SparseEvidence, Support
from outrider_coordinator.session import table_columns as col
from outrider_coordinator.session.committed_tokens import CommittedTokens
from outrider_coordinator.session.draft_side import Drafted, DraftSide
from outrider_coordinator.session.engine_request import EngineRequest
from outrider_coordinator.session.table import IntColumn, Row
from outrider_coordinator.session.target_side import TargetSide


class CommandBuilder:
    """Builds commands; sends nothing."""

    session = IntColumn(col.NUMBER)
    """Number of the session on its links."""
    _generation = IntColumn(col.GENERATION)

    def __init__(self, engine_request: EngineRequest, tokens: CommittedTokens, row: Row) -> None:
        self.row = row
        self.session = -1
        self.trace_parent = ""
        """Trace parent of items to come; empty when they are not traced."""
        self.trace_id = ""
        """Trace id of the request, for the services' logs; empty when it is part of no trace."""
        self._engine_request = engine_request
        self._tokens = tokens

    def open_draft(self, side: DraftSide) -> Open:
        """Open the session on the draft, which may have fewer ids than the target."""
        limit = self._engine_request.rules.num_token_ids
        known = side.facts.num_token_ids
        return self._open(num_token_ids=min(limit, known) if known else limit)

    def open_target(self, *, has_prompt_logprobs: bool, hidden_state_layers: tuple[int, ...] = ()) -> Open:
        """Open the session on the target; requests prompt logprobs until they have arrived."""
        engine_request = self._engine_request
        num_prompt_logprobs = None if has_prompt_logprobs else engine_request.num_prompt_logprobs
        return self._open(
            num_token_ids=engine_request.rules.num_token_ids,
            num_logprobs=engine_request.num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            hidden_state_layers=hidden_state_layers,
        )

    def extend(self, side: DraftSide, draft_length: int) -> Extend:
        """Send the draft the tokens that it lacks; one that reads hidden states as many as there are states for. Where
        nothing is known of what it holds, all tokens and no states, for it to say.
        """
        kept, tokens = side.held, self._tokens
        states = side.states.first_part() if side.has_answered else None  # one that reads none has none
        new_tokens = tokens.after(kept)
        if states is not None:
            new_tokens = new_tokens[: states.end + 1 - kept]
        # By position, here and below: by name it takes several times as long.
        return Extend(
            self.session,
            self._next_generation(),
            kept,
            tokens.prefix_hash(kept),
            new_tokens,
            draft_length if kept + len(new_tokens) == tokens.length else 0,
            self.trace_parent,
            states,
        )

    def score(
        self,
        side: TargetSide,
        drafted: Drafted,
        hidden_states_from: int | None = None,
        length: int | None = None,
    ) -> Score:
        """Brings the target what it lacks, and the proposal to judge. Positions whose hidden states are wanted are
        computed anew where it holds them. ``length``: with the text up to there alone, which is part of it.
        """
        kept, tokens = side.held, self._tokens
        if hidden_states_from is not None:
            kept = min(kept, hidden_states_from)
        return Score(
            self.session,
            self._next_generation(),
            kept,
            tokens.prefix_hash(kept),
            tokens.after(kept) if length is None else tokens.after(kept)[: length - kept],
            drafted.token_ids,
            _support(drafted),
            self.trace_parent,
            hidden_states_from,
        )

    def prepare(self, num_steps: int) -> Prepare:
        """Lets the target compute plain steps after the newest ``Score`` before they are asked for."""
        return Prepare(self.session, self._generation, num_steps)

    def release(self) -> Release:
        """Ends the session on either side."""
        return Release(self.session, self._next_generation())

    def _open(
        self,
        *,
        num_token_ids: int,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        hidden_state_layers: tuple[int, ...] = (),
    ) -> Open:
        engine_request = self._engine_request
        return Open(
            session=self.session,
            generation=self._next_generation(),
            sampling=engine_request.sampling,
            seed=engine_request.seed,
            judging_rule=engine_request.rules.rule,
            prompt_length=len(engine_request.prompt_token_ids),
            max_length=engine_request.max_length,
            num_token_ids=num_token_ids,
            eos_token_ids=tuple(sorted(engine_request.ending_token_ids)),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            logprobs_mode=engine_request.logprobs_mode,
            request_id=engine_request.request_id,
            trace_id=self.trace_id,
            prefix_hash_key=engine_request.prefix_hash_key,
            cache_salt=engine_request.cache_salt,
            arrival_ns=engine_request.arrival_ns,
            hidden_state_layers=hidden_state_layers,
            in_turn=not engine_request.draft_ahead,
        )

    def _next_generation(self) -> int:
        values = self.row.values
        values[col.GENERATION] = generation = values.item(col.GENERATION) + 1
        return generation


def _support(drafted: Drafted) -> Support | None:
    evidence = drafted.evidence
    return Support(evidence.counts, evidence.token_ids) if isinstance(evidence, SparseEvidence) else None
