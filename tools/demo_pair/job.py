"""Shared parts of the stages: the corpus on the device, fitting a set of models, and the prompts of the measurements.

Owns the wiring between the parts of this package.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from demo_pair import measuring, publish
from demo_pair.corpus import BOS_ID, Corpus
from demo_pair.model import Llama, TrainedShape
from demo_pair.recipes import DRAFT_TEXT, SAMPLED_SHARE, SEED, TESTS_SHARE, SampledText
from demo_pair.sampling import sample
from demo_pair.streams import Mixture, TokenStream
from demo_pair.training import Student, TrainingRecipe, prepare, train

log = logging.getLogger(__name__)

MEASURES_PER_RUN = 6
ACCEPTANCE_ROWS = 96
ACCEPTANCE_TOKENS = 128
PROMPT_TOKENS = 64
TEMPERATURES = (0.0, 0.7, 1.0)
DRAFT_LENGTH = 4
_ROWS_WRITTEN_AT_ONCE = 8192
"""Rows written at once: their keys and values take 33 GB on a GPU."""


class TrainingJob:
    """One stage at work in one folder on one device."""

    def __init__(self, work: Path, device: str, text_seed: int = 0) -> None:
        """``text_seed``: another one has the target write other text."""
        self.work, self.device = work, torch.device(device)
        self.corpus = Corpus.load(work / "corpus.npz")
        self.tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.text_seed = text_seed
        self.num_written = 0
        """Tokens that the target wrote to be learnt from."""
        self._held_out = torch.from_numpy(self.corpus.held_out.astype(np.int32)).to(self.device)
        torch.manual_seed(SEED)

    @cached_property
    def corpus_rows(self) -> Mixture:
        """Rows of the library and of its tests."""
        library = TokenStream.of(self.corpus.library, self.device, self.tokenizer)
        tests = TokenStream.of(self.corpus.tests, self.device, self.tokenizer)
        return Mixture([(library, 1 - TESTS_SHARE), (tests, TESTS_SHARE)], self._generator(1))

    def draft_rows(
        self, target: Llama, texts: Sequence[SampledText] = DRAFT_TEXT, sampled_share: float = SAMPLED_SHARE
    ) -> Mixture:
        """The corpus, and text that the target wrote."""
        parts = [(stream, share * (1 - sampled_share)) for stream, share in self.corpus_rows.parts]
        total = sum(text.rows for text in texts)
        written = [(self._written(target, text), sampled_share * text.rows / total) for text in texts]
        return Mixture(parts + written, self._generator(2))

    def fit(
        self, shapes: dict[str, TrainedShape], recipe: TrainingRecipe, data: Mixture, teacher: Llama | None
    ) -> tuple[dict[str, Llama], dict[str, Any]]:
        """Train one model of each shape on the same rows and publish them in the work folder; models and histories."""
        models = {name: prepare(Llama(shape), self.device) for name, shape in shapes.items()}
        students = {name: Student(model, recipe) for name, model in models.items()}
        every = max(1, recipe.steps // MEASURES_PER_RUN)
        train(list(students.values()), data, teacher, self._watch, every)
        for name, model in models.items():
            model.set_dropout(0.0)
            publish.publish(model.state_dict(), model.shape, self.work / "tokenizer.json", self.work / name)
        return models, {name: asdict(student.history) for name, student in students.items()}

    def completions(self, target: Llama) -> dict[str, Any]:
        """The completions that the card counts and shows."""
        each = measuring.COMPLETIONS // len(measuring.PROMPTS)
        drawn = [
            completion
            for seed, prompt in enumerate(measuring.PROMPTS)
            for completion in self._complete(target, prompt, count=each, temperature=0.8, seed=seed)
        ]
        shown = measuring.SHOWN_PROMPTS
        greedy = [self._complete(target, prompt, count=1, temperature=0.0, seed=0)[0] for prompt in shown]
        return {"sampled": [asdict(item) for item in drawn], "greedy": [asdict(item) for item in greedy]}

    def acceptance(self, target: Llama, draft: Llama | measuring.MeasuredDraft) -> dict[str, Any]:
        """Acceptance at each temperature, after prompts from the held-out files."""
        prompts = self._held_out_prompts()
        return {
            str(temperature): measuring.speculate(
                target,
                draft,
                prompts,
                draft_length=DRAFT_LENGTH,
                new_tokens=ACCEPTANCE_TOKENS,
                temperature=temperature,
                generator=self._generator(3),
            ).as_figures()
            for temperature in TEMPERATURES
        }

    def _complete(
        self, target: Llama, prompt: str, *, count: int, temperature: float, seed: int
    ) -> list[measuring.Completion]:
        return measuring.complete(
            target, self.tokenizer, prompt, count=count, temperature=temperature, seed=seed, device=self.device
        )

    def _held_out_prompts(self) -> torch.Tensor:
        """Evenly spread pieces of the held-out stream, each beginning with bos and a statement.  # [B, T]"""
        stream = TokenStream.of(self.corpus.held_out, self.device, self.tokenizer)
        inside = stream.starts[stream.starts < stream.ids.numel() - PROMPT_TOKENS]
        begin = inside[torch.linspace(0, len(inside) - 1, ACCEPTANCE_ROWS, device=self.device).long()] - 1
        rows = stream.ids[begin[:, None] + torch.arange(PROMPT_TOKENS, device=self.device)].long()
        rows[:, 0] = BOS_ID
        return rows

    def _written(self, target: Llama, text: SampledText) -> TokenStream:
        generator = self._generator(4 + int(10 * text.temperature) + 20 * self.text_seed)
        prompts = Mixture(self.corpus_rows.parts, generator).rows(text.rows, text.prompt_tokens)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        few = partial(
            sample, target, new_tokens=text.new_tokens, temperature=text.temperature, generator=generator, dtype=dtype
        )
        rows = torch.cat([few(part) for part in torch.split(prompts, _ROWS_WRITTEN_AT_ONCE)])
        self.num_written += rows.numel()
        log.info("wrote %d tokens at temperature %.1f", rows.numel(), text.temperature)
        return TokenStream.of(rows.flatten().cpu().numpy().astype(np.uint16), self.device)

    def _watch(self, model: Llama) -> float:
        return measuring.nats_per_token(model, self._held_out, model.shape.max_positions)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(SEED * 100 + number)
