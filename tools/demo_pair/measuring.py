"""Measurements of the model card: bits per byte, completions that parse, acceptance.

Owns the measurements, each in float32 on the published weights.
"""

import ast
import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from demo_pair.corpus import BOS_ID, EOS_ID
from demo_pair.model import Llama
from demo_pair.sampling import distribution, draw, sample

PROMPTS = (
    "def ",
    "class Stack:\n",
    "import os\n\ndef read_lines(path):",
    "class Config:\n    def __init__(self",
    "import re\nimport sys\n",
    "try:\n    import ",
    "def main():\n",
    "from collections import ",
    "def parse_args(argv=None):\n",
    "class Error(Exception):\n",
)
ALLOW_INCOMPLETE_INPUT = 0x4000  # as in the standard library's codeop
SHOWN_PROMPTS = PROMPTS[:3]
COMPLETIONS = 200
COMPLETION_TOKENS = 256


@torch.no_grad()
def nats_per_token(model: Llama, ids: Tensor, window: int, rows: int = 16) -> float:
    """Mean loss over a stream cut into windows: quick, for watching a run.  # ids [T]"""
    count = (ids.numel() - 1) // window
    inputs = ids[: count * window].view(count, window).long()
    wanted = ids[1 : count * window + 1].view(count, window).long()
    precise = torch.autocast("cuda", dtype=torch.bfloat16, enabled=ids.is_cuda)
    total = 0.0
    for start in range(0, count - count % rows or count, rows):
        with precise:
            logits = model.eval()(inputs[start : start + rows])
        total += functional.cross_entropy(logits.flatten(0, 1).float(), wanted[start : start + rows].flatten()).item()
    return total / max(1, count // rows)


@torch.no_grad()
def bits_per_byte(model: Llama, ids: npt.NDArray[np.uint16], num_bytes: int, device: torch.device) -> float:
    """Bits spent on every token but bos, over the bytes of the files.  # ids [T]: files of bos, tokens, eos

    Files are scored one by one; past the context, windows step by half: what is counted has half a context before it.
    """
    bounds = [*np.flatnonzero(ids == BOS_ID).tolist(), len(ids)]
    nats = 0.0
    for begin, end in pairwise(bounds):
        nats += _file_nats(model, torch.from_numpy(ids[begin:end].astype(np.int64)).to(device))
    return nats / math.log(2) / num_bytes


def _file_nats(model: Llama, ids: Tensor) -> float:
    context = model.shape.max_positions
    scored, nats = 1, 0.0
    while scored < len(ids):
        end = min(len(ids), scored + (context // 2 if scored > 1 else context))
        start = max(0, end - 1 - context)
        logits = model(ids[None, start : end - 1])[0, scored - 1 - start :]
        nats += functional.cross_entropy(logits, ids[scored:end], reduction="sum").item()
        scored = end
    return nats


def parses(text: str, *, finished: bool) -> bool:
    """True if the text is Python up to its last whole statement.

    A text that was cut off loses its last line, which may be half a line; what remains may stop inside an open bracket,
    string or block, but may hold no error before that point.
    """
    lines = text if finished else text[: text.rfind("\n") + 1]
    try:
        compile(lines, "<completion>", "exec", flags=ALLOW_INCOMPLETE_INPUT | ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as error:
        return not finished and "incomplete input" in str(error.msg)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt and what the target wrote after it."""

    prompt: str
    text: str
    finished: bool

    @property
    def parses(self) -> bool:
        """True if prompt and text together are Python up to the last whole statement."""
        return parses(self.prompt + self.text, finished=self.finished)


def complete(
    model: Llama, tokenizer: Tokenizer, prompt: str, *, count: int, temperature: float, seed: int, device: torch.device
) -> list[Completion]:
    """`count` completions of one prompt."""
    prefix = torch.tensor([tokenizer.encode(prompt).ids] * count, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    rows = sample(
        model, prefix, new_tokens=COMPLETION_TOKENS, temperature=temperature, generator=generator, dtype=torch.float32
    )
    return [_completion(tokenizer, prompt, row) for row in rows[:, prefix.shape[1] :].tolist()]


def _completion(tokenizer: Tokenizer, prompt: str, ids: list[int]) -> Completion:
    end = next((index for index, token in enumerate(ids) if token in (EOS_ID, BOS_ID)), None)
    return Completion(prompt, tokenizer.decode(ids[:end]), finished=end is not None)


class MeasuredDraft(Protocol):
    """Draft of the reference loop that is no model."""

    def propose(
        self, ids: Tensor, lengths: Tensor, *, draft_length: int, temperature: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Write a proposal behind each row of ids; tokens [B, K] and what they were drawn from [B, K, V]."""
        ...


@dataclass(slots=True)
class MeasuredAcceptance:
    """Counts of one run of the reference loop."""

    judged: int = 0
    accepted: int = 0
    steps: int = 0
    emitted: int = 0

    def as_figures(self) -> dict[str, float]:
        """Acceptance (of judged tokens) and mean acceptance length, with the counts behind them."""
        return {
            "acceptance": self.accepted / self.judged,
            "mean_acceptance_length": self.emitted / self.steps,
            "judged": self.judged,
            "steps": self.steps,
        }


@torch.no_grad()
def speculate(
    target: Llama,
    draft: Llama | MeasuredDraft,
    prompts: Tensor,
    *,
    draft_length: int,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> MeasuredAcceptance:
    """Rejection sampling as the papers have it, over prompts [B, T] of one length; no cache, whole rows, the reference.

    Every row goes on until it has `new_tokens` more or has emitted eos.
    """
    batch, prompt_length = prompts.shape
    # A row may stop up to K past its last token, and stopped rows still get proposals that are not counted.
    ids = torch.full((batch, prompt_length + new_tokens + 2 * draft_length + 1), EOS_ID, device=prompts.device)
    ids[:, :prompt_length] = prompts
    lengths = torch.full((batch,), prompt_length, device=prompts.device)
    running = torch.ones(batch, dtype=torch.bool, device=prompts.device)
    counts = MeasuredAcceptance()
    propose_next = partial(propose, draft) if isinstance(draft, Llama) else draft.propose
    while bool(running.any()):
        proposed, draft_probs = propose_next(
            ids, lengths, draft_length=draft_length, temperature=temperature, generator=generator
        )
        target_probs = score(target, ids, lengths, draft_length, temperature)
        accepted, following = judge(proposed, draft_probs, target_probs, generator)
        _count(counts, accepted[running], draft_length)
        ids.scatter_(1, (lengths + accepted)[:, None], following[:, None])
        fresh = torch.arange(draft_length + 1, device=ids.device) <= accepted[:, None]
        new = ids.gather(1, lengths[:, None] + torch.arange(draft_length + 1, device=ids.device))
        ended = ((new == EOS_ID) & fresh).any(1)
        lengths = torch.where(running, lengths + accepted + 1, lengths)
        running &= ~ended & (lengths < prompt_length + new_tokens)
    return counts


def _count(counts: MeasuredAcceptance, accepted: Tensor, draft_length: int) -> None:
    counts.steps += accepted.numel()
    counts.accepted += int(accepted.sum())
    counts.judged += int((accepted + 1).clamp(max=draft_length).sum())
    counts.emitted += int((accepted + 1).sum())


def propose(
    draft: Llama, ids: Tensor, lengths: Tensor, *, draft_length: int, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Write a proposal behind each row of ids; tokens [B, K] and the distributions they were drawn from [B, K, V]."""
    tokens, probs = [], []
    rows = torch.arange(ids.shape[0], device=ids.device)
    for offset in range(draft_length):
        end = int(lengths.max()) + offset
        logits = draft(ids[:, :end])[rows, lengths + offset - 1]
        probs.append(distribution(logits, temperature))
        tokens.append(draw(probs[-1], generator))
        ids[rows, lengths + offset] = tokens[-1]
    return torch.stack(tokens, 1), torch.stack(probs, 1)


def score(target: Llama, ids: Tensor, lengths: Tensor, draft_length: int, temperature: float) -> Tensor:
    """The target's distributions at the proposed positions and the one after them.  # [B, K + 1, V]"""
    logits = target(ids[:, : int(lengths.max()) + draft_length])
    positions = lengths[:, None] - 1 + torch.arange(draft_length + 1, device=ids.device)
    return distribution(logits.gather(1, positions[..., None].expand(-1, -1, logits.shape[-1])), temperature)


def judge(
    proposed: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Number of kept tokens of each proposal, and the token that follows them.  # [B, K] -> [B], [B]"""
    batch, length = proposed.shape
    at = proposed[..., None]
    ratio = (target_probs[:, :length].gather(-1, at) / draft_probs.gather(-1, at)).squeeze(-1)
    coins = torch.rand(batch, length, generator=generator, device=proposed.device)
    accepted = (coins < ratio).long().cumprod(1).sum(1)
    rows = torch.arange(batch, device=proposed.device)
    # After all K nothing was drafted: there the residual is the target itself.
    padded = functional.pad(draft_probs, (0, 0, 0, 1))
    residual = (target_probs[rows, accepted] - padded[rows, accepted]).clamp(min=0.0)
    empty = residual.sum(-1, keepdim=True) == 0.0
    return accepted, draw(torch.where(empty, target_probs[rows, accepted], residual), generator)
