"""Scales of an FP8 KV cache, measured: for checkpoints that have none.

The model continues a few random texts over a small cache of its own type; a layer's scales follow from the largest
keys and values that it stored. Scales are powers of two with headroom: numbers keep all their digits, a rounding
error of the measurement changes no scale, and every rank has the same ones.
"""

from __future__ import annotations

import logging
import math

import torch

from outrider.errors import ModelError
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.loader.model import LoadedModel, Ranks
from outrider.model_executor.model_runner import ModelRunner
from outrider.model_executor.worker import Worker

_log = logging.getLogger(__name__)
_NUM_TEXTS = 8
"""Texts from which the scales are measured."""
_GIVEN_TOKENS, _OWN_TOKENS = 96, 32
"""Tokens of each text: random ones, and those that the model continues it with."""
_HEADROOM = 4.0
"""Largest number that the cache can hold, over the largest that was seen."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST_EXPONENT, _MOST_EXPONENT = -40, 40


def measure_kv_scales(worker: Worker, ranks: Ranks | None = None) -> None:
    """Set the scales of all attention layers before the first forward; every rank calls it at the same point.

    ``ModelError`` for keys or values that are no finite numbers.
    """
    layers = worker.model.scaled_layers
    for attention in layers.values():
        attention.set_kv_scales(1.0, 1.0)
    with torch.inference_mode():
        runner = _runner_of_texts(worker)
        _write_texts(runner)
        maxima = [
            runner.kv_cache.layer(worker.model.cache_layers[number]).abs().amax(dim=(0, 2, 3)).float()
            for number in layers
        ]
    exponents = [_exponent(number, float(value)) for number, pair in zip(layers, maxima, strict=True) for value in pair]
    if ranks is not None:
        exponents = [-ranks.least(-exponent) for exponent in exponents]
    keys, values = exponents[::2], exponents[1::2]
    for attention, key, value in zip(layers.values(), keys, values, strict=True):
        attention.set_kv_scales(2.0**key, 2.0**value)
    _log.info(
        "scales of the KV cache were measured over %d tokens: keys 2^%d to 2^%d, values 2^%d to 2^%d",
        _NUM_TEXTS * (_GIVEN_TOKENS + _OWN_TOKENS), min(keys), max(keys), min(values), max(values),
    )  # fmt: skip


def _runner_of_texts(worker: Worker) -> ModelRunner:
    """The same model over a cache of its own type for the texts alone, on this rank; what no text reaches is zero."""
    length = min(worker.max_model_len, _GIVEN_TOKENS + _OWN_TOKENS)
    num_pages = _NUM_TEXTS * -(-length // worker.page_size)
    num_slots = _NUM_TEXTS if worker.kv_cache.states is not None else 0
    loaded = LoadedModel(
        worker.model, worker.page_size, num_pages, length, worker.model.dtype, num_state_slots=num_slots
    )
    runner = ModelRunner(Worker(loaded), prefix_caching=False)
    for group in runner.kv_cache.groups:
        group.zero_()
    return runner


def _write_texts(runner: ModelRunner) -> None:
    """Store the keys and values of texts that are the same whenever this is called."""
    length, vocab_size = runner.max_model_len, runner.config.vocab_size
    num_given = max(1, min(_GIVEN_TOKENS, length // 2))
    given = torch.randint(vocab_size, (_NUM_TEXTS, num_given), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = [runner.sequences.open(length) for _ in given]
    for _ in range(length - num_given + 1):
        rows = [ForwardRow(sequence, ids, 1) for sequence, ids in zip(sequences, given, strict=True)]
        given = [[token] for token in runner.forward(rows).argmax(dim=-1).tolist()]


def _exponent(layer: int, largest: float) -> int:
    """Exponent of the least power of two that keeps the headroom over ``largest``."""
    if not math.isfinite(largest):
        raise ModelError(f"layer {layer}: keys and values are no finite numbers, from which no scales can be measured")
    if largest == 0.0:
        return 0
    return max(_LEAST_EXPONENT, min(_MOST_EXPONENT, math.ceil(math.log2(_HEADROOM * largest / _LARGEST))))
