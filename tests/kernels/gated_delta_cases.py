"""The kernels of Gated DeltaNet against their reference; see ``triton_cases``."""

from __future__ import annotations

import os

import pytest
import torch

from outrider.kernels.gated_delta import DeltaRows, DeltaShape, DeltaSlots, DeltaWeights, gated_norm, reference
from outrider.kernels.gated_delta.kernel import gated_delta
from outrider.model_executor.cost_profile import _greedy as greedy_metadata
from outrider.model_executor.draft_loop import DraftingRules, DraftRow
from outrider.model_executor.graph_shapes import GraphLimits
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner
from tests.model_executor.parity import Scripted, build, open_scripted, random_ids, reference_logits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]
LOG, NUM_SLOTS = 16, 4
SHAPES = [DeltaShape(4, 2, 8, 12, 4), DeltaShape(3, 3, 16, 40, 3)]
if not INTERPRETED:
    SHAPES += [DeltaShape(48, 16, 128, 128, 4)]


class Rig:
    """Slots and weights of one layer, twice: for the kernels and for the reference."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.generator = torch.Generator(DEVICE).manual_seed(1)
        states = torch.full((NUM_SLOTS, shape.num_heads, shape.key_dim, shape.value_dim), float("nan"), device=DEVICE)
        logs = torch.full((NUM_SLOTS, LOG, shape.num_inputs), float("nan"), dtype=dtype, device=DEVICE)
        self.slots, self.expected = DeltaSlots(states, logs), DeltaSlots(states.clone(), logs.clone())
        self.weights = DeltaWeights(
            self.random(shape.num_channels, shape.num_taps), -self.random(shape.num_heads).exp() * 0.1,
            self.random(shape.num_heads),
        )  # fmt: skip

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=DEVICE, generator=self.generator)

    def run(self, *rows: tuple[int, int, int, int, int], num_padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of (slot, tokens, length, start, end), through both; what they give."""
        counts = [count for _, count, *_ in rows]
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        columns = [[row[place] for row in rows] for place in (2, 0, 3, 4)]
        lengths, *others = [[*column, -1] for column in columns] if num_padding else columns
        numbers = [[*starts, starts[-1]] if num_padding else starts, lengths, [0] * starts[-1], *others]
        batch = DeltaRows(*(torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in numbers))
        inputs = self.random(sum(counts) + num_padding, self.shape.num_inputs).to(self.dtype)
        arguments = batch, self.weights, self.shape
        return gated_delta(inputs, self.slots, *arguments), reference.gated_delta(inputs, self.expected, *arguments)

    def check(self, *rows: tuple[int, int, int, int, int], num_padding: int = 0) -> None:
        found, expected = self.run(*rows, num_padding=num_padding)
        count = len(found) - num_padding
        assert found[:count].isfinite().all()
        torch.testing.assert_close(found[:count], expected[:count], atol=2e-5, rtol=1e-4)
        for own, other in zip(self.slots, self.expected, strict=True):
            torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, [*DTYPES, DTYPES[1]], strict=False)))
def test_states_and_outputs_are_the_reference_s(shape: DeltaShape, dtype: torch.dtype) -> None:
    """Prompts, replayed tokens, drafts of which some are kept, a state that moves not at all, and slots of NaN."""
    rig = Rig(shape, dtype)
    rig.check((2, 20, 20, 0, 16), (0, 3, 3, 0, 0))
    rig.check((0, 5, 7, 0, 1), (2, 1, 21, 16, 17), (1, 1, 1, 0, 0), num_padding=3)
    rig.check((2, 4, 23, 17, 18), (0, 2, 6, 1, 3))
    rig.check((1, 40, 41, 0, 37))


def test_a_state_has_the_same_bits_however_its_tokens_come() -> None:
    shape = SHAPES[0]
    whole, parts = Rig(shape, torch.float32), Rig(shape, torch.float32)
    inputs = whole.random(12, shape.num_inputs)
    weights = whole.weights

    def run(rig: Rig, start: int, stop: int, before: int, after: int) -> torch.Tensor:
        columns = [0, stop - start], [stop], [0] * (stop - start), [0], [before], [after]
        rows = DeltaRows(*(torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns))
        return gated_delta(inputs[start:stop].contiguous(), rig.slots, rows, weights, shape)

    expected = run(whole, 0, 12, 0, 12)
    steps = [(0, 5, 0, 2), (4, 9, 2, 4), (6, 7, 4, 6), (7, 12, 6, 12)]
    found = {start: run(parts, start, *rest) for start, *rest in steps}
    for start, output in found.items():
        assert torch.equal(output, expected[start : start + len(output)])
    assert torch.equal(parts.slots.states[0], whole.slots.states[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gated_norm_is_the_reference_s(dtype: torch.dtype) -> None:
    rig = Rig(SHAPES[1], dtype)
    x, weight = rig.random(5, 3, 40), rig.random(40).to(dtype)
    gate = rig.random(5, 130).to(dtype)[:, 10:]
    x[4:] = float("nan")  # of no row
    rows = DeltaRows(
        *(torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in ([0, 4], [4], [0] * 4, [0], [0], [0]))
    )
    found = gated_norm(x, gate, weight, 1e-6, rows)
    expected = reference.gated_norm(x, gate.reshape(x.shape), weight, 1e-6)
    torch.testing.assert_close(found[:4], expected[:4], atol=1e-3 if dtype != torch.float32 else 1e-5, rtol=1e-3)
    assert not found[4:].any()


def test_a_model_gives_its_reference_s_logits_with_captured_forwards() -> None:
    """A prompt, drafts beside another prompt, fewer drafts kept, and a fork."""
    folder = build("qwen3_5_moe_text")
    limits = GraphLimits(max_sequences=2, max_tokens=8, max_draft_length=3, max_batched_tokens=32)
    runner = ModelRunner.load(
        folder, device=DEVICE, dtype="float32", page_size=4, num_pages=60, num_state_slots=6, max_model_len=64,
        graphs=limits,
    )  # fmt: skip
    runner.capture()
    with torch.inference_mode():
        runner.kv_cache.fill_(float("nan"))
    text = random_ids(60, seed=1)
    first, second = open_scripted(runner, folder, 60), open_scripted(runner, folder, 60)
    check_forward(runner, (first, text[:20]))
    runner.sequences.commit(first.sequence, 20)
    check_forward(runner, (first, text[20:24]), (second, text[:3]))
    assert runner.used_graph
    runner.sequences.truncate(first.sequence, 22)
    check_forward(runner, (first, text[40:43]))
    fork = Scripted(runner, folder, runner.sequences.fork(second.sequence, 50))
    check_forward(runner, (second, text[9:10]), (fork, text[30:31]))
    assert runner.used_graph


def check_forward(runner: ModelRunner, *rows: tuple[Scripted, list[int]]) -> None:
    logits = runner.forward([row.row(token_ids) for row, token_ids in rows]).cpu()
    for (row, token_ids), found in zip(rows, torch.split(logits, [len(ids) for _, ids in rows]), strict=True):
        expected = reference_logits(row.folder, row.sequence.token_ids)[-len(token_ids) :]
        torch.testing.assert_close(found, expected, atol=1e-4 if INTERPRETED else 1e-3, rtol=0)


def test_loops_draw_what_forwards_would_over_any_number_of_kept_drafts() -> None:
    """Rows of a loop end their draws at different steps, and go on with some of them."""
    folder = build("qwen3_5_text")
    limits = GraphLimits(max_sequences=2, max_tokens=8, max_draft_length=3, max_batched_tokens=32)
    runner = ModelRunner.load(
        folder, device=DEVICE, dtype="float32", page_size=4, num_pages=60, num_state_slots=3, max_model_len=64,
        graphs=limits, drafting=DraftingRules(),
    )  # fmt: skip
    runner.capture()
    metadata, texts = greedy_metadata(runner.config.vocab_size, 64), [random_ids(9, seed=2), random_ids(4, seed=3)]
    sequences = [runner.sequences.open(60) for _ in texts]
    runner.forward([ForwardRow(one, text[:-1], 0) for one, text in zip(sequences, texts, strict=True)])
    fed = [text[-1:] for text in texts]
    for counts, kept in (((4, 1), (2, 0)), ((2, 5), (2, 3)), ((1, 3), (0, 1))):
        rows = [
            DraftRow(metadata, one, ids, count, len(text))
            for one, ids, count, text in zip(sequences, fed, counts, texts, strict=True)
        ]
        for number, draws in enumerate(runner.draft(rows)):
            drawn, text = list(draws.token_ids), texts[number]
            for place in range(counts[number]):
                logits = reference_logits(folder, [*text, *drawn[:place]])[-1]
                assert int(logits.argmax()) == drawn[place]
            taken = drawn[: kept[number]]
            runner.sequences.commit(sequences[number], len(text))
            held = min(len(text) + len(taken), sequences[number].length)
            runner.sequences.truncate(sequences[number], held)
            texts[number] = [*text, *taken, 7]
            fed[number] = texts[number][held:]
