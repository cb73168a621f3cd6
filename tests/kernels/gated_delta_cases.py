"""The kernels of Gated DeltaNet against their reference; see ``triton_cases``."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

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


def one_by_one(
    inputs: torch.Tensor, weights: DeltaWeights, shape: DeltaShape
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs [T, H, V] of a text's inputs, and the states [H, K, V] after 0 to T tokens: the rule as published, in
    float64.
    """
    heads, keys, group = shape.num_heads, shape.num_key_heads, shape.num_heads // shape.num_key_heads
    channels, rates, decays = torch.split(inputs.double(), [shape.num_channels, heads, heads], 1)
    padded = torch.cat((channels.new_zeros(shape.num_taps - 1, shape.num_channels), channels))
    mixed = F.silu((padded.unfold(0, shape.num_taps, 1) * weights.taps.double()).sum(-1))  # [T, C]
    queries, key_parts, values = torch.split(
        mixed, [keys * shape.key_dim, keys * shape.key_dim, heads * shape.value_dim], 1
    )  # fmt: skip
    q, k = (part.view(-1, keys, shape.key_dim).repeat_interleave(group, 1) for part in (queries, key_parts))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    v = values.view(-1, heads, shape.value_dim)
    b, g = rates.sigmoid(), weights.decay.double() * F.softplus(decays + weights.bias.double())
    states, outputs = [v.new_zeros(heads, shape.key_dim, shape.value_dim)], []
    for t in range(len(inputs)):
        state = states[-1] * g[t].exp()[:, None, None]
        error = b[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        states.append(state + k[t][:, :, None] * error[:, None])
        outputs.append(torch.einsum("hkv,hk->hv", states[-1], q[t]) * shape.key_dim**-0.5)
    return torch.stack(outputs), states


class Texts:
    """Texts whose tokens come forward by forward, through the kernels; expected are those of the whole text."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype, lengths: list[int]) -> None:
        self.rig = Rig(shape, dtype)
        self.inputs = [self.rig.random(length, shape.num_inputs).to(dtype) for length in lengths]
        self.expected = [one_by_one(inputs, self.rig.weights, shape) for inputs in self.inputs]
        self.ends = [0] * len(lengths)

    def check(self, *rows: tuple[int, int, int, int], num_idle: int = 0, in_chunks: bool = True) -> torch.Tensor:
        """Tokens ``start`` to ``stop`` - 1 of each text, after which the checkpoint is at ``end``; returns outputs."""
        counts = [stop - start for _, start, stop, _ in rows]
        query_starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        query_starts += [query_starts[-1]] * num_idle
        columns = [
            query_starts, [stop for _, _, stop, _ in rows], [0] * query_starts[-1], [text for text, *_ in rows],
            [self.ends[text] for text, *_ in rows], [end for *_, end in rows],
        ]  # fmt: skip
        columns = [
            columns[0],
            columns[1] + [0] * num_idle,
            columns[2],
            *(part + [-1] * num_idle for part in columns[3:]),
        ]
        batch = DeltaRows(
            *(torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns), in_chunks=in_chunks
        )
        inputs = torch.cat([self.inputs[text][start:stop] for text, start, stop, _ in rows])
        found = gated_delta(inputs, self.rig.slots, batch, self.rig.weights, self.rig.shape)
        tolerance = 1e-5 if inputs.dtype == torch.float32 or INTERPRETED else 2e-3  # tf32
        for (text, start, stop, end), part in zip(rows, torch.split(found, counts), strict=True):
            outputs, states = self.expected[text]
            assert distance(part, outputs[start:stop]) < tolerance
            assert distance(self.rig.slots.states[text], states[end]) < tolerance
            self.ends[text] = end
        return found


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], *SHAPES[2:]])
def test_prompts_in_chunks_are_those_token_by_token(shape: DeltaShape, dtype: torch.dtype) -> None:
    """Lengths that are no multiple of a chunk, several prompts beside rows of few tokens and rows that idle, states
    that replayed tokens come before, checkpoints at any place of a chunk.
    """
    texts = Texts(shape, dtype, [150, 95, 30, 128])
    texts.check((0, 0, 17, 13))
    texts.check((1, 0, 95, 94), (2, 0, 5, 1), (0, 15, 81, 70), (3, 0, 64, 64), num_idle=2)
    texts.check((2, 5, 9, 4), (0, 72, 150, 136), (3, 64, 128, 128))
    texts.check((2, 6, 30, 14), num_idle=1)


def test_the_form_of_a_row_depends_on_its_own_tokens() -> None:
    alone, beside = (Texts(SHAPES[0], torch.float32, [40, 20]) for _ in range(2))
    expected = alone.check((1, 0, 12, 8)), alone.check((0, 0, 40, 36), in_chunks=False)
    found = beside.check((0, 0, 40, 36), (1, 0, 12, 8))
    assert torch.equal(found[40:], expected[0])
    assert not torch.equal(found[:40], expected[1])
    assert torch.equal(alone.rig.slots.states[1], beside.rig.slots.states[1])


def test_equal_keys_and_slow_decay_keep_their_digits() -> None:
    """The inverse of a chunk's system has small numbers where powers of the system have large ones."""
    texts = Texts(SHAPES[0], torch.float32, [90])
    texts.rig.weights.decay.mul_(1e-3)
    texts.inputs[0][:, : SHAPES[0].num_channels] = texts.inputs[0][:1, : SHAPES[0].num_channels]
    texts.inputs[0][:, SHAPES[0].num_channels :] = 4.0
    texts.expected = [one_by_one(texts.inputs[0], texts.rig.weights, SHAPES[0])]
    texts.check((0, 0, 90, 80))


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


@pytest.mark.integration
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


@pytest.mark.integration
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
