"""Fuzzed messages are what they are meant to be: legal on the wire, extreme in value, large where they should be."""

from __future__ import annotations

import random

import pytest

from outrider.v1 import generation_pb2, link_pb2
from tests.faults.fuzzing import oversized, templates
from tests.faults.fuzzing.campaign import METHODS
from tests.faults.fuzzing.mutation import Mutator


def test_changes_reach_every_field_of_a_request_and_repeat_by_seed() -> None:
    touched: set[str] = set()
    for seed in range(300):
        message = generation_pb2.GenerateRequest()
        Mutator(random.Random(seed)).mutate(message, 3)
        again = generation_pb2.GenerateRequest()
        Mutator(random.Random(seed)).mutate(again, 3)
        assert message.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
        touched |= {field.name for field, _ in message.ListFields()}
    assert touched == {field.name for field in generation_pb2.GenerateRequest.DESCRIPTOR.fields}


def test_every_method_of_every_service_is_sent_messages() -> None:
    services = [service for file in (generation_pb2, link_pb2) for service in file.DESCRIPTOR.services_by_name.values()]
    ours = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert ours <= {method.path for method in METHODS}


@pytest.mark.parametrize("script", [templates.target_script, templates.draft_script])
def test_scripts_are_changed_without_an_error(script: object) -> None:
    for seed in range(200):
        rng = random.Random(seed)
        for message in script(rng):  # type: ignore[operator]
            Mutator(rng).mutate(message, 4)
            message.SerializeToString()


@pytest.mark.parametrize("filling", oversized.fillings(), ids=str)
def test_every_filling_is_a_request_of_about_its_size(filling: oversized.Filling) -> None:
    content = filling.request(20_000)
    assert 19_000 < len(content) < 21_000
    honest = len(generation_pb2.GenerateRequest.FromString(oversized.HONEST).SerializeToString())
    assert generation_pb2.GenerateRequest.FromString(content).ByteSize() > honest


def test_every_list_and_every_text_of_a_request_is_filled() -> None:
    names = {str(filling) for filling in oversized.fillings()}
    assert {"prompt_text long", "sampling.logit_bias entries", "bad_words entries", "stop some"} <= names
    assert "sampling.allowed_token_ids entries" in names
