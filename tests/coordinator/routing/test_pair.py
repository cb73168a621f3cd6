"""Drafts that fit a target, and errors for those that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.errors import PairMismatchError
from outrider.types import ModelDescription
from outrider_coordinator.routing.model_pair import check_pair, check_same_model


def files(vocab: dict[str, int], **fields: Any) -> dict[str, bytes]:
    return {"tokenizer.json": json.dumps({"model": {"vocab": vocab}, **fields}).encode()}


def describe(role: str, vocab: dict[str, int], *, sha: str, **fields: Any) -> ModelDescription:
    shape: dict[str, Any] = {"vocab_size": 8, "num_token_ids": len(vocab), "tokenizer_files": files(vocab)}
    return ModelDescription(
        role=role, model_name=f"the-{role}", architecture="", max_model_len=100, tokenizer_hash=sha,
        **(shape | fields),
    )  # fmt: skip


VOCAB = {"a": 0, "b": 1, "c": 2}
TARGET = describe("target", VOCAB, sha="1" * 64)


def test_the_same_tokenizer_fits_however_the_rows_are_padded() -> None:
    check_pair(TARGET, describe("draft", VOCAB, sha="1" * 64, vocab_size=3))
    check_pair(TARGET, describe("draft", VOCAB, sha="1" * 64, vocab_size=4096))


@pytest.mark.parametrize(("name", "value"), [("batch_invariant", True), ("dtype", "float16"), ("quantization", "fp8")])
def test_targets_whose_logits_differ_do_not_take_over_from_each_other(name: str, value: object) -> None:
    check_same_model(TARGET, TARGET)
    with pytest.raises(PairMismatchError, match=f"its {name} is {value!r}, not "):
        check_same_model(TARGET, describe("target", VOCAB, sha="1" * 64, **{name: value}))


def test_other_rules_with_the_same_ids_fit() -> None:
    check_pair(TARGET, describe("draft", VOCAB, sha="2" * 64))


def test_ids_that_differ_are_named() -> None:
    with pytest.raises(PairMismatchError) as caught:
        check_pair(TARGET, describe("draft", {"a": 0, "c": 1, "b": 2}, sha="2" * 64))
    message = str(caught.value)
    assert "the-draft" in message
    assert "the-target" in message
    assert "2 ids differ" in message
    assert "id 1 is 'c' in the draft and 'b' in the target" in message


def test_sizes_that_differ_are_told() -> None:
    with pytest.raises(PairMismatchError, match=r"4 and 3 tokens, 1 ids differ, the first: id 3 is 'd' .* None"):
        check_pair(TARGET, describe("draft", {**VOCAB, "d": 3}, sha="2" * 64))


def test_added_tokens_and_vocabularies_kept_as_lists_count() -> None:
    target = describe(
        "target", VOCAB, sha="1" * 64, tokenizer_files=files(VOCAB, added_tokens=[{"id": 3, "content": "<e>"}])
    )
    unigram = {"tokenizer.json": json.dumps({"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}}).encode()}
    with pytest.raises(PairMismatchError, match="1 ids differ, the first: id 3 is None in the draft and '<e>'"):
        check_pair(target, describe("draft", VOCAB, sha="2" * 64, tokenizer_files=unigram))


def test_without_files_the_hashes_are_told() -> None:
    with pytest.raises(PairMismatchError, match="222222222222 and 111111111111"):
        check_pair(TARGET, describe("draft", VOCAB, sha="2" * 64, tokenizer_files={}))


def test_a_draft_with_too_few_rows_never_fits() -> None:
    with pytest.raises(PairMismatchError, match="2 rows, fewer than the 3 token ids"):
        check_pair(TARGET, describe("draft", VOCAB, sha="1" * 64, vocab_size=2))


def test_a_draft_without_a_model_always_fits() -> None:
    check_pair(TARGET, describe("draft", {}, sha="", vocab_size=0, num_token_ids=0, tokenizer_files={}))


def test_a_pair_without_tokenizers_cannot_be_compared_and_is_taken() -> None:
    check_pair(TARGET, describe("draft", VOCAB, sha="", tokenizer_files={}))


def test_a_head_reads_hidden_states_that_the_target_has() -> None:
    target = describe("target", VOCAB, sha="1" * 64, hidden_size=64, num_layers=4)
    check_pair(target, describe("draft", VOCAB, sha="1" * 64, hidden_size=64, hidden_state_layers=(2, 4)))
    with pytest.raises(PairMismatchError, match="reads hidden states of 32 values, and those of the target"):
        check_pair(target, describe("draft", VOCAB, sha="1" * 64, hidden_size=32, hidden_state_layers=(2,)))
    with pytest.raises(PairMismatchError, match="hidden states of layer 5, and the target the-target has 4 layers"):
        check_pair(target, describe("draft", VOCAB, sha="1" * 64, hidden_size=64, hidden_state_layers=(2, 5)))
