"""A training step without its launches: forward and backward pass captured as one CUDA graph.

The models here are so small that a step's launches take the host longer than the device needs to compute them.
Owns capture and replay.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

NUM_EAGER_CALLS = 4
"""Calls before the capture: compilation, workspaces of libraries and cached constants are made in them."""


class CapturedStep:
    """A function of one tensor that computes a loss and leaves gradients; on a GPU replayed from its fifth call on.

    Inputs must all have one shape. The function may not copy from the host or wait for the device.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], parameters: Iterable[nn.Parameter]) -> None:
        self._compute, self._parameters = compute, list(parameters)
        self._num_calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None
        self._gradients: list[Tensor | None] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        """The loss; gradients of the parameters are those of this call alone. The loss is overwritten by the next."""
        if not inputs.is_cuda:
            return self._compute(inputs)
        self._num_calls += 1
        if self._num_calls <= NUM_EAGER_CALLS:
            return self._compute_beside(inputs)
        graph = self._graph or self._capture(inputs)
        self._inputs.copy_(inputs)
        graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _compute_beside(self, inputs: Tensor) -> Tensor:
        """Compute on a stream of its own, as a capture demands of what runs before it."""
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._compute(inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _capture(self, inputs: Tensor) -> torch.cuda.CUDAGraph:
        for parameter in self._parameters:
            parameter.grad = None  # so that the backward pass makes them in the graph's memory
        self._inputs, graph = inputs.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            self._loss = self._compute(self._inputs)
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._graph = graph
        return graph
