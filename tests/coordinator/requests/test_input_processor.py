"""Input processor of the coordinator: from a user's request to an engine request."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from outrider.chat import ChatPrompt
from outrider.config import CoordinatorSettings
from outrider.errors import InvalidRequestError
from outrider.generation import DEFAULTABLE, TO_THE_END, GenerationRequest
from outrider.tokenization import ModelText
from outrider.tokenization.sampling_defaults import SAMPLING_DEFAULTS, sampling_defaults
from outrider.types import AcceptanceMethod, JudgingRule, LogprobsMode, ModelDescription, SamplingParams
from outrider_coordinator.requests.input_processor import started
from tests.coordinator.tokenizers_for_tests import END, START, byte_level, text_tokenizer
from tests.support.input_processing import SteppedProcessor

TARGET = ModelDescription(
    role="target", model_name="t", architecture="", vocab_size=300, num_token_ids=258, max_model_len=20,
    eos_token_ids=(256,), page_size=4, num_pages=100,
)  # fmt: skip
TOKENIZER = text_tokenizer(byte_level())
TEMPLATE = b"{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
TEXT = ModelText.from_files(
    {
        "tokenizer.json": byte_level().to_str().encode(),
        "chat_template.jinja": TEMPLATE,
        "generation_config.json": b'{"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": "x", "do_sample": true}',
    }
)


NEW_TOKENS = b'{"max_new_tokens": 3}'


def input_processor(
    target: ModelDescription = TARGET, *, has_tokenizer: bool = True, **settings: Any
) -> SteppedProcessor:
    return SteppedProcessor(CoordinatorSettings(**settings), target, TEXT if has_tokenizer else ModelText())


def ask(**fields: Any) -> GenerationRequest:
    return GenerationRequest(**({"prompt": "hello"} | fields))


def test_a_prompt_is_tokenized_or_taken_as_it_is() -> None:
    assert input_processor().process(ask()).prompt_token_ids == TOKENIZER.encode_prompt("hello")
    assert input_processor().process(GenerationRequest(prompt_token_ids=(1, 2))).prompt_token_ids == (1, 2)


def test_an_empty_prompt_that_a_start_token_fills_is_one() -> None:
    processor, start = input_processor(), byte_level().token_to_id(START)
    processor.text = ModelText.from_files({"tokenizer.json": byte_level(has_start=True).to_str().encode()})
    assert processor.process(ask(prompt="")).prompt_token_ids == (start,)
    with pytest.raises(InvalidRequestError, match="prompt: must not be empty"):
        processor.process(ask(prompt="", add_special_tokens=False))


def test_output_is_trimmed_to_the_models_length() -> None:
    assert input_processor().process(ask(max_tokens=1000)).max_tokens == 15
    assert input_processor().process(ask(max_tokens=7)).max_tokens == 7


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt", ask(prompt="")),
        ("prompt", ask(prompt="x" * 20)),
        ("prompt_token_ids", GenerationRequest(prompt_token_ids=(1,) * 20)),
        ("prompt_token_ids", GenerationRequest(prompt_token_ids=(258,))),
        ("prompt", GenerationRequest()),
        ("stop_token_ids", ask(stop_token_ids=(258,))),
        ("logit_bias", ask(sampling=SamplingParams(logit_bias=((258, 1.0),)))),
        ("temperature", ask(sampling=SamplingParams(temperature=-1))),
        ("bad_words", ask(bad_words=(" ",))),
    ],
)
def test_bad_requests_name_their_field(field: str, request_: GenerationRequest) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        input_processor().process(request_)
    assert caught.value.field == field


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert input_processor().process(ask(prompt="x" * 19)).max_tokens == 1


def test_what_can_never_fit_is_refused_at_once() -> None:
    small = ModelDescription(
        role="target", model_name="t", architecture="", vocab_size=300, num_token_ids=258, max_model_len=20,
        page_size=4, num_pages=3,
    )  # fmt: skip
    assert input_processor(small).process(ask(max_tokens=7)).max_length == 12
    with pytest.raises(InvalidRequestError, match="need 4 KV pages, and the target has 3") as caught:
        input_processor(small).process(ask(max_tokens=8))
    assert caught.value.field == "max_tokens"


def test_ends_of_sequence_may_be_ignored_and_stop_tokens_may_not() -> None:
    plan = input_processor().process(ask(stop_token_ids=(9,)))
    assert plan.ending_token_ids == {9, 256}
    assert input_processor().process(ask(stop_token_ids=(9,), ignore_eos=True)).ending_token_ids == {9}


def test_a_seed_is_made_up_when_none_is_given() -> None:
    assert input_processor().process(ask(seed=7)).seed == 7
    assert input_processor().process(ask(seed=2**64 - 1)).seed == 2**64 - 1
    assert len({input_processor().process(ask()).seed for _ in range(20)}) == 20
    assert len({input_processor().process(ask()).request_id for _ in range(20)}) == 20
    assert input_processor().process(ask(request_id="mine")).request_id == "mine"


def test_bad_words_become_token_runs() -> None:
    plan = input_processor().process(ask(bad_words=("hi",)))
    assert plan.sampling.bad_words == (TOKENIZER.encode_prompt("hi"), TOKENIZER.encode_prompt(" hi"))


def test_settings_give_the_defaults() -> None:
    plan = input_processor(
        acceptance_method=AcceptanceMethod.TYPICAL, posterior_threshold=0.2, posterior_alpha=0.4,
        logprobs_mode=LogprobsMode.PROCESSED,
    ).process(ask())  # fmt: skip
    assert plan.acceptance_method is AcceptanceMethod.TYPICAL
    assert (plan.rules.rule, plan.rules.posterior_threshold, plan.rules.posterior_alpha) == (
        JudgingRule.TYPICAL,
        0.2,
        0.4,
    )
    assert plan.logprobs_mode is LogprobsMode.PROCESSED
    assert input_processor().process(ask(acceptance_method=AcceptanceMethod.COUPLED)).rules.rule is JudgingRule.COUPLED


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_bounded_by_a_setting(field: str) -> None:
    assert input_processor().process(ask(**{field: 20}))
    assert input_processor(max_logprobs=30).process(ask(**{field: 30}))
    with pytest.raises(InvalidRequestError, match=f"{field}: is 31; at most 30, the server's setting max_logprobs"):
        input_processor(max_logprobs=30).process(ask(**{field: 31}))


def test_no_allowed_id_is_said_twice() -> None:
    plan = input_processor().process(ask(sampling=SamplingParams(allowed_token_ids=(5, 3, 5, 3))))
    assert plan.sampling.allowed_token_ids == (5, 3)


def test_more_allowed_ids_than_tokens_are_refused_whatever_they_are() -> None:
    with pytest.raises(InvalidRequestError, match=r"allowed_token_ids: has .* as many as the vocabulary"):
        input_processor().process(ask(sampling=SamplingParams(allowed_token_ids=(5,) * 1001)))


def test_a_text_that_cannot_fit_is_refused_by_its_beginning() -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt: has \d+ tokens in its first \d+ of 200000 characters"):
        input_processor().process(ask(prompt="hello " * 33_333 + "xx"))


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_logprobs_may_be_switched_off(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        input_processor(disable_logprobs=True).process(ask(**{field: 0}))


def test_priorities_are_of_a_server_that_orders_requests_by_them() -> None:
    with pytest.raises(InvalidRequestError, match="priority: must be 0, since the server's scheduling_policy is fcfs"):
        input_processor().process(ask(priority=-1))
    assert input_processor(scheduling_policy="priority").process(ask(priority=-1)).priority == -1


@pytest.mark.parametrize("fields", [{}, {"stop": ("x",)}, {"bad_words": ("x",)}], ids=["prompt", "stop", "bad_words"])
def test_without_a_tokenizer_text_is_refused(fields: dict[str, Any]) -> None:
    prompt = {"prompt": None, "prompt_token_ids": (1,)} if fields else {}
    with pytest.raises(InvalidRequestError, match="no tokenizer") as caught:
        input_processor(has_tokenizer=False).process(ask(**fields, **prompt))
    assert caught.value.field == next(iter(fields), "prompt")


CHAT = ChatPrompt(({"role": "user", "content": "hello"},))


def test_a_chat_is_rendered_and_tokenized_without_special_tokens() -> None:
    plan = input_processor().process(GenerationRequest(chat=CHAT))
    assert plan.prompt_token_ids == TOKENIZER.encode_prompt("hello:", add_special_tokens=False)
    assert started(GenerationRequest(chat=CHAT), plan).prompt_token_ids == plan.prompt_token_ids


@pytest.mark.parametrize(
    ("field", "chat"),
    [
        ("messages", ChatPrompt(())),
        ("messages", ChatPrompt(({"role": "user", "content": "x" * 30},))),
        ("messages", ChatPrompt(({"role": "user", "content": "\ud800"},))),
        ("chat_template", ChatPrompt(CHAT.messages, chat_template="other")),
    ],
)
def test_a_bad_chat_names_its_field(field: str, chat: ChatPrompt) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        input_processor().process(GenerationRequest(chat=chat))
    assert caught.value.field == field


def test_a_chat_needs_a_tokenizer_and_a_template() -> None:
    with pytest.raises(InvalidRequestError, match="messages: "):
        input_processor(has_tokenizer=False).process(GenerationRequest(chat=CHAT))


def test_a_prompt_is_given_once() -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        input_processor().process(GenerationRequest(prompt="a", chat=CHAT))


def test_parameters_that_are_left_to_the_server_are_the_models_own() -> None:
    asked = ask(sampling=SamplingParams(top_p=0.5), defaulted=frozenset(DEFAULTABLE) - {"top_p"})
    sampling = input_processor().process(asked).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.5, 20, 0.0)
    for off in ("none", "vllm"):
        sampling = input_processor(generation_config=off).process(asked).sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 0.5, 0)
    assert input_processor().process(ask(sampling=SamplingParams(temperature=0.0))).sampling.temperature == 0.0


def test_output_to_the_end_is_what_the_model_and_its_pages_hold() -> None:
    assert input_processor().process(ask(max_tokens=TO_THE_END)).max_tokens == 15
    small = replace(TARGET, num_pages=2)
    assert input_processor(small).process(ask(max_tokens=TO_THE_END)).max_tokens == 3
    with pytest.raises(InvalidRequestError, match="KV pages"):
        input_processor(small).process(ask(max_tokens=4))


def test_output_without_a_limit_has_the_models_own() -> None:
    processor = input_processor()
    processor.text = replace(TEXT, sampling_defaults=sampling_defaults({"generation_config.json": NEW_TOKENS}))
    assert processor.process(ask(max_tokens=TO_THE_END)).max_tokens == 3
    assert processor.process(ask(max_tokens=7)).max_tokens == 7
    off = input_processor(generation_config="none")
    off.text = processor.text
    assert off.process(ask(max_tokens=TO_THE_END)).max_tokens == 15


@pytest.mark.parametrize("eos_token", [END, {"content": END, "special": True}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_token_of_the_tokenizer_ends_a_generation(name: str, eos_token: object) -> None:
    files = {"tokenizer.json": byte_level().to_str().encode(), name: json.dumps({"eos_token": eos_token}).encode()}
    text, end = ModelText.from_files(files), int(byte_level().token_to_id(END) or 0)
    for known, expected in (((7,), (7, end)), ((end, 7), (end, 7)), ((), (end,))):
        processor = input_processor(replace(TARGET, eos_token_ids=known))
        processor.text = text
        assert processor.process(ask()).eos_token_ids == processor.eos_token_ids == expected
        assert processor.process(ask(ignore_eos=True)).eos_token_ids == ()


@pytest.mark.parametrize("eos_token", [None, "<|nowhere|>", 5])
def test_an_end_token_that_the_vocabulary_lacks_is_none(eos_token: object) -> None:
    config = json.dumps({"eos_token": eos_token}).encode()
    text = ModelText.from_files({"tokenizer.json": byte_level().to_str().encode(), "tokenizer_config.json": config})
    processor = input_processor()
    processor.text = text
    assert processor.eos_token_ids == (256,)


def test_an_end_token_that_the_model_lacks_is_none() -> None:
    files = {"tokenizer.json": byte_level().to_str().encode(), "tokenizer_config.json": b'{"eos_token": "<|end|>"}'}
    processor = input_processor(replace(TARGET, num_token_ids=200, eos_token_ids=(7,)))
    processor.text = ModelText.from_files(files)
    assert processor.eos_token_ids == (7,)


def test_sampling_is_checked_with_the_models_defaults_in() -> None:
    processor = input_processor()
    processor.text = replace(TEXT, sampling_defaults={"repetition_penalty": -1.0})
    processor.process(ask())
    with pytest.raises(InvalidRequestError, match=r"repetition_penalty: must be finite and above 0, not -1\.0"):
        processor.process(ask(defaulted=frozenset(DEFAULTABLE)))


@pytest.mark.parametrize("value", ["1" + 400 * "0", str(2**40), "-5", "true", "1e999"])
@pytest.mark.parametrize("name", SAMPLING_DEFAULTS)
def test_a_default_that_no_message_carries_is_not_used(name: str, value: str) -> None:
    assert sampling_defaults({"generation_config.json": f'{{"{name}": {value}}}'.encode()}) == {}
