"""The reference that streams under load are compared with: it agrees with decoding and finds a changed token."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.config import TargetSettings
from outrider.model_executor.input_batch import ForwardRow
from outrider.sampling.proposing import propose
from outrider.sampling.rows import LogitRow
from outrider.sampling.session import SessionSampling
from tests.faults.invariance.__main__ import TINY
from tests.faults.invariance.load import Load, Stream
from tests.faults.invariance.reference import Alone, opening
from tests.faults.invariance.weights import write_pair

_NUM_TOKENS = 40


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    target, _ = write_pair(Path(tmp_path_factory.mktemp("flat")) / "pair", TINY, "cpu")
    values = {"model": str(target), "device": "cpu", "dtype": "float32", "num_pages": 200, "max_model_len": 1200}
    return Alone(TargetSettings.model_validate(values))


def decode(alone: Alone, stream: Stream) -> None:
    """Write the stream's output token by token."""
    session = SessionSampling(opening(stream, TINY.vocab_size))
    sequence = alone.runner.sequences.open(len(stream.prompt) + _NUM_TOKENS)
    rest = stream.prompt
    while len(stream.output) < _NUM_TOKENS:
        logits = alone.runner.forward([ForwardRow(sequence, rest, 1)])
        length = len(stream.text)
        rest = [propose(logits, [LogitRow(session, stream.text, length, length)])[0].token_id]
        stream.output += rest
    alone.runner.sequences.release(sequence)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_a_changed_token_is_found(alone: Alone, temperature: float) -> None:
    stream = Load(1, _NUM_TOKENS, (temperature,), TINY.vocab_size).streams()[0]
    decode(alone, stream)
    assert alone.first_difference(stream) is None
    stream.output[7] = (stream.output[7] + 1) % TINY.vocab_size
    assert alone.first_difference(stream) == 7
