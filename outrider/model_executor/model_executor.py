"""One model and its cache on one device: runs steps, in the order in which they come.

Owns the weights, the cache, the captured forwards and draft loops. Whoever shares a model with others runs the same
steps as they do, and ``publish`` is called with each before it is run here. Not thread-safe. Refuses to know sequences,
sampling and how steps travel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.kernels.kv_store import copy_pages
from outrider.kernels.launching import has_kernels
from outrider.kernels.paged_attention import plan_attention
from outrider.kv_cache import PageCopy
from outrider.model_executor.cuda_graphs import Captured, CaptureProgress, CudaGraphRunner
from outrider.model_executor.device_inputs import BatchShape
from outrider.model_executor.draft_loop import DraftingRules
from outrider.model_executor.draft_loop.loop import DraftLoop
from outrider.model_executor.draft_loop.plan import DraftPlan, loop_of
from outrider.model_executor.draft_loop.results import Numbers
from outrider.model_executor.graph_shapes import DEFAULT_LIMITS, GraphLimits
from outrider.model_executor.input_batch import ForwardBatch
from outrider.model_executor.models import Decoder
from outrider.model_executor.models.decoder import DeviceBatch
from outrider.model_executor.steps import Operation, Step, batch_of, copies_of, copy_step, forward_step, no_numbers

Publish = Callable[[Step], None]
"""Called with a step that is about to be run; returns when nothing of the step is needed any more."""


class ModelExecutor:
    """Runs steps over a cache of ``num_pages`` pages."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        page_size: int,
        num_pages: int,
        max_model_len: int,
        drafting: DraftingRules | None = None,
        graphs: GraphLimits = DEFAULT_LIMITS,
        publish: Publish | None = None,
    ) -> None:
        self.decoder = decoder
        self.kv_cache = make_cache(decoder, num_pages * page_size)
        self.page_size, self.num_pages, self.max_model_len = page_size, num_pages, max_model_len
        self._publish = publish
        self._on_gpu = (
            CudaGraphRunner(
                decoder, self.kv_cache, page_size=page_size, max_model_len=max_model_len, drafting=drafting,
                limits=graphs,
            )
            if has_kernels(decoder.device)
            else None
        )  # fmt: skip

    @property
    def is_on_gpu(self) -> bool:
        """Whether the device is one, or a CPU that does what one would, to be tested."""
        return self._on_gpu is not None

    @property
    def takes_drawn(self) -> bool:
        """Whether ``forward_drawn`` can be: on one GPU. Other ranks would have to be told what only this one has."""
        return self._on_gpu is not None and self._publish is None

    def forward_drawn(self, batch: ForwardBatch, drawn: torch.Tensor) -> torch.Tensor:
        """``forward`` of a batch whose first token ids are ``drawn`` [n] int32, on the device."""
        if self._on_gpu is None:
            raise ValueError(f"nothing is drawn on {self.decoder.device} that is not known here")
        return self._on_gpu.run(self._on_gpu.step_for(batch), drawn)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [N, V], of the weights' type, of a batch whose pages have been copied."""
        if self._on_gpu is not None:
            step = self._on_gpu.step_for(batch)
        elif self._publish is None:  # nobody to tell: no need of numbers that travel
            return self._forward(batch)
        else:
            step = forward_step(batch, BatchShape.of(batch))
        self._tell(step)
        return self._run_forward(step)

    @property
    def drafting(self) -> DraftingRules | None:
        """How ``draft`` draws; None where there is none."""
        return self._loop.rules if self._loop is not None else None

    @property
    def max_draft_rows(self) -> int:
        """Rows that ``draft`` takes at most."""
        return self._loop.max_rows if self._loop is not None else 0

    def draft(self, plan: DraftPlan, *, with_supports: bool) -> tuple[Numbers, Numbers | None]:
        """Run a loop whose pages have been copied, and wait for it: records [K, R, NUM_FIELDS], supports [K, R, 2, S],
        valid until the next.
        """
        if self._loop is None:
            raise ValueError(f"there are no draft loops on {self.decoder.device}")
        step = self._loop.step_for(plan)
        self._tell(step)
        shape = loop_of(step)
        self._loop.run(shape, step.numbers)
        return self._loop.results(shape, with_supports=with_supports)

    def copy_pages(self, copies: tuple[PageCopy, ...]) -> None:
        """Copy pages; every source is read before any destination is written."""
        if copies:
            self._tell(step := copy_step(copies))
            self.run(step)

    def capture(self, progress: CaptureProgress | None = None) -> None:
        """On a GPU, capture the shapes of decoding and scoring as CUDA graphs."""
        if self._on_gpu is not None:
            self._tell(Step(Operation.CAPTURE, (), no_numbers()))
            self._on_gpu.capture(progress)

    @property
    def captured(self) -> Captured | None:
        """What capturing came to; None where there is none."""
        return self._on_gpu.captured if self._on_gpu is not None else None

    def run(self, step: Step) -> None:
        """Run a step that another process made; what comes of it stays here."""
        if step.operation == Operation.FORWARD:
            self._run_forward(step)
        elif step.operation == Operation.COPY_PAGES:
            copy_pages(self.kv_cache, copies_of(step), page_size=self.page_size)
        elif step.operation == Operation.DRAFT and self._loop is not None:
            self._loop.run(loop_of(step), step.numbers)
        elif step.operation == Operation.CAPTURE and self._on_gpu is not None:
            self._on_gpu.capture()
        else:
            raise ValueError(f"there is no step {step.operation} on {self.decoder.device}")

    def take_device(self) -> None:
        """Make this thread's launches go to the device; a GPU is chosen thread by thread."""
        if self.kv_cache.is_cuda:
            torch.cuda.set_device(self.kv_cache.device)  # unlike the name it was asked for by, this has an index

    def wait(self) -> None:
        """Return when the device has done all it was given."""
        if self.kv_cache.is_cuda:
            torch.cuda.synchronize(self.decoder.device)

    @property
    def _loop(self) -> DraftLoop | None:
        return self._on_gpu.loop if self._on_gpu is not None else None

    def _tell(self, step: Step) -> None:
        if self._publish is not None:
            self._publish(step)

    def _run_forward(self, step: Step) -> torch.Tensor:
        return self._forward(batch_of(step)) if self._on_gpu is None else self._on_gpu.run(step)

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self.decoder(self._to_device(batch), self.kv_cache)

    def _to_device(self, batch: ForwardBatch) -> DeviceBatch:
        device, dtype = self.decoder.device, self.decoder.dtype
        windows = set(self.decoder.config.sliding_windows)
        return DeviceBatch(
            token_ids=torch.tensor(batch.token_ids, device=device),
            positions=torch.tensor(batch.positions, device=device),
            slots=torch.tensor(batch.slots, device=device),
            plans={
                window: plan_attention(batch, page_size=self.page_size, window=window, device=device, dtype=dtype)
                for window in windows
            },
            logit_indices=torch.tensor(batch.logit_indices, dtype=torch.int64, device=device),
        )


def make_cache(decoder: Decoder, num_slots: int) -> torch.Tensor:
    """A cache of so many tokens' keys and values, uninitialised: what a free page holds is never read."""
    config = decoder.part
    return torch.empty(  # [L, S, 2, H_kv, D]
        config.num_layers,
        num_slots,
        2,
        config.num_kv_heads,
        config.head_dim,
        dtype=decoder.dtype,
        device=decoder.device,
    )
