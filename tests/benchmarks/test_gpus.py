"""Placement of a measured system, in numbers and words."""

import dataclasses

import pytest

from outrider.benchmarks.serving.gpus import describe_placement, num_gpus
from outrider.generation import ModelPlacement
from tests.benchmarks.scripted_client import INFO


@pytest.mark.parametrize(
    ("target", "draft", "number", "words"),
    [
        (("cpu", 1), ("cpu", 1), 0, ""),
        (("cuda:0", 1), ("", 1), 1, "target on 1 GPU"),
        (("cuda:0", 1), ("cuda:0", 1), 1, "target and draft on one GPU"),
        (("cuda:0", 1), ("cuda:1", 1), 2, "target on 1 GPU, draft on 1 more"),
        (("cuda:0", 2), ("cuda:1", 1), 2, "target on 2 GPUs, draft on one of them"),
        (("cuda", 2), ("cuda:0", 2), 2, "target and draft on 2 GPUs"),
    ],
)
def test_gpus_are_those_of_both_models(
    target: tuple[str, int], draft: tuple[str, int], number: int, words: str
) -> None:
    places = [ModelPlacement(device=device, tensor_parallel_size=size) for device, size in (target, draft)]
    info = dataclasses.replace(INFO, target_placement=places[0], draft_placement=places[1])
    assert (num_gpus(info), describe_placement(info)) == (number, words)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (None, "target and draft on one GPU"),
        (1, "target and draft on one GPU"),
        (2, "2 replicas, each target and draft on one GPU"),
    ],
)
def test_further_replicas_are_named(gpus: int | None, words: str) -> None:
    place = ModelPlacement(device="cuda:0", tensor_parallel_size=1)
    info = dataclasses.replace(INFO, target_placement=place, draft_placement=place)
    assert describe_placement(info, gpus) == words
