"""Tokenizing, incremental detokenizing and stop texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError, InvalidRequestError
from outrider.tokenization import ModelText, TextTokenizer
from outrider_coordinator.text import Detokenizer, StopMatcher
from outrider_coordinator.text.stops import StopMatch, StopText
from tests.coordinator.tokenizers_for_tests import END, START, byte_fallback, byte_level, text_tokenizer
from tests.support.examples import SAME_EACH_TIME

BYTES = byte_level()
BYTE_TEXT = text_tokenizer(BYTES)
# Pieces that begin inside one character and end inside the next.
TORN = byte_level(merges=(("Ł", "ä"), ("½", "å"), ("ĸ", "Ń"), ("ð", "Ł"), ("h", "e"), ("Ġ", "h")))
TORN_TEXT = text_tokenizer(TORN)
FALLBACK_TEXT = text_tokenizer(byte_fallback())


def pieces_of(tokenizer: TextTokenizer, token_ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_TEXT, TORN_TEXT, FALLBACK_TEXT], ids=["bytes", "torn", "fallback"])
@pytest.mark.parametrize("text", ["hello world", "a é 中文 😀😀 b", "hello 你好 hello", "é", "😀"])
def test_characters_are_never_split_and_the_text_is_whole(tokenizer: TextTokenizer, text: str) -> None:
    pieces = pieces_of(tokenizer, list(tokenizer.encode_prompt(text)))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@given(st.text(max_size=40))
@settings(SAME_EACH_TIME, max_examples=150)
def test_any_text_comes_out_as_it_went_in(text: str) -> None:
    for tokenizer in (BYTE_TEXT, TORN_TEXT):
        assert "".join(pieces_of(tokenizer, list(tokenizer.encode_prompt(text)))) == text


@given(st.lists(st.integers(0, 255), max_size=60))
@settings(SAME_EACH_TIME, max_examples=150)
def test_any_bytes_give_the_text_of_all_of_them(token_ids: list[int]) -> None:
    pieces = pieces_of(BYTE_TEXT, token_ids)
    assert "".join(pieces) == BYTE_TEXT.decode(token_ids)


def test_a_character_comes_with_its_last_byte() -> None:
    assert pieces_of(BYTE_TEXT, list(BYTE_TEXT.encode_prompt("a😀b"))) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_shows_at_the_end_alone() -> None:
    ids = list(BYTE_TEXT.encode_prompt("a中"))[:-1]
    assert pieces_of(BYTE_TEXT, ids) == ["a", "", "", "\ufffd"]


def test_a_character_begun_in_the_prompt_is_finished_in_the_output() -> None:
    ids = BYTE_TEXT.encode_prompt("中")
    assert "".join(pieces_of(BYTE_TEXT, list(ids[2:]), ids[:2])) == "中"


def test_spaces_that_depend_on_the_prompt_are_kept() -> None:
    prompt, output = FALLBACK_TEXT.encode_prompt("hello"), list(FALLBACK_TEXT.encode_prompt("world"))
    assert "".join(pieces_of(FALLBACK_TEXT, output, prompt)) == " world"
    assert "".join(pieces_of(FALLBACK_TEXT, output)) == "world"


def test_endless_garbage_is_given_out_in_the_end() -> None:
    continuation = BYTE_TEXT.encode_prompt("é")[1]
    pieces = pieces_of(BYTE_TEXT, [continuation] * 500)
    assert max(map(len, pieces)) < 100
    assert set("".join(pieces)) == {"\ufffd"}


def test_special_tokens_have_no_text() -> None:
    ids = list(BYTE_TEXT.encode_prompt(f"a{END}b"))
    assert len(ids) == 3
    assert "".join(pieces_of(BYTE_TEXT, ids)) == "ab"


def test_the_start_token_is_put_first_once() -> None:
    start = BYTES.token_to_id(START)
    asked = TextTokenizer.from_files({"tokenizer.json": BYTES.to_str().encode()}, bos_token_id=start)
    own = byte_level(has_start=True)
    does_it_itself = TextTokenizer.from_files({"tokenizer.json": own.to_str().encode()}, bos_token_id=start)
    assert asked is not None
    assert does_it_itself is not None
    expected = (start, *BYTE_TEXT.encode_prompt("hi"))
    assert asked.encode_prompt("hi") == does_it_itself.encode_prompt("hi") == expected
    assert asked.encode_prompt(f"{START}hi") == expected


def test_bad_words_are_meant_with_and_without_a_space() -> None:
    merged = TORN.token_to_id("Ġh")
    e, h, he = (TORN.token_to_id(piece) for piece in ("e", "h", "he"))
    assert TORN_TEXT.encode_bad_words(("he",)) == ((he,), (TORN.token_to_id("Ġ"), he))
    assert TORN_TEXT.encode_bad_words(("h",)) == ((h,), (merged,))
    assert TORN_TEXT.encode_bad_words((" e", "e")) == ((e,), (TORN.token_to_id("Ġ"), e))


@pytest.mark.parametrize("word", ["", "  "])
def test_a_bad_word_without_tokens_is_refused(word: str) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words"):
        BYTE_TEXT.encode_bad_words((word,))


def test_a_tokenizer_from_a_folder(tmp_path: Path) -> None:
    BYTES.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer.from_folder(tmp_path).encode_prompt("hey") == BYTE_TEXT.encode_prompt("hey")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        TextTokenizer.from_folder(tmp_path / "nowhere")
    assert caught.value.field == "coordinator.tokenizer"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be used"):
        TextTokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "most"),
    [("tokenizer.json", 128 << 20), ("tokenizer_config.json", 16 << 20), ("chat_template.jinja", 16 << 20)],
)
def test_a_file_beside_a_tokenizer_that_is_too_long_is_not_read(tmp_path: Path, name: str, most: int) -> None:
    BYTES.save(str(tmp_path / "tokenizer.json"))
    with (tmp_path / name).open("wb") as stream:
        stream.truncate(most + 1)
    with pytest.raises(ConfigError, match=f"{name} cannot be read: it has more than {most} bytes"):
        ModelText.from_folder(tmp_path)


def test_files_without_a_tokenizer_give_none() -> None:
    assert TextTokenizer.from_files({"config.json": b"{}"}) is None


# Stop texts.


def run_stops(stops: tuple[str, ...], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """(what was given out for each piece, the stop text found)."""
    matcher = StopMatcher(stops, include_stop=include)
    given_out: list[str] = []
    for piece in pieces:
        found = matcher.push(piece)
        if isinstance(found, StopMatch):
            return [*given_out, found.text], found.stop
        given_out.append(found)
    return [*given_out, matcher.flush()], None


def test_text_that_may_begin_a_stop_is_held_back() -> None:
    assert run_stops(("END",), ["a", "E", "N", "x", "E"]) == (["a", "", "", "ENx", "", "E"], None)


def test_a_stop_across_tokens() -> None:
    assert run_stops(("\n\ndef",), ["x", "\n", "\nd", "ef foo"]) == (["x", "", "", ""], "\n\ndef")
    assert run_stops(("\n\ndef",), ["x", "\n", "\nd", "ef foo"], include=True)[0][-1] == "\n\ndef"


def test_a_stop_within_one_token_cuts_what_follows() -> None:
    assert run_stops(("<<",), ["ab<<cd"]) == (["ab"], "<<")
    assert run_stops(("<<",), ["ab<<cd"], include=True) == (["ab<<"], "<<")


def test_overlapping_beginnings_are_not_missed() -> None:
    assert run_stops(("aab",), ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_the_earliest_match_wins() -> None:
    assert run_stops(("world", "hello"), ["hello world"]) == ([""], "hello")
    assert run_stops(("b", "abc"), ["xabc"]) == (["xa"], "b")  # as it would be, came it letter by letter
    assert run_stops(("bc", "abc"), ["xabc"]) == (["x"], "abc")


@given(st.text(alphabet="abc", max_size=20), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
@settings(SAME_EACH_TIME, max_examples=300)
def test_what_comes_out_does_not_depend_on_the_pieces(text: str, stops: list[str]) -> None:
    one_piece, letters = run_stops(tuple(stops), [text]), run_stops(tuple(stops), list(text))
    assert "".join(one_piece[0]) == "".join(letters[0])
    assert one_piece[1] == letters[1]
    if one_piece[1] is None:
        assert "".join(one_piece[0]) == text
        assert not any(stop in text for stop in stops)


def test_a_stop_may_not_end_before_it_is_armed_but_may_begin_there() -> None:
    matcher = StopMatcher(("xy",))
    assert matcher.push("axyx", armed=False) == "axy"
    assert matcher.push("ybc") == StopMatch("xy", "")
    matcher = StopMatcher(("xy",))
    assert matcher.push("xy", armed=False) == "xy"
    assert matcher.push("z") == "z"


def test_a_stop_may_end_in_text_that_may_yet_change() -> None:
    for include, shown in ((False, "x"), (True, "xab")):
        assert StopMatcher(("ab",), include_stop=include).push("xa", "bc") == StopMatch("ab", shown)


pushes = st.lists(st.tuples(st.text(alphabet="ab", max_size=6), st.booleans()), max_size=8)


@given(pushes, st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3))
@settings(SAME_EACH_TIME, max_examples=500)
def test_stops_are_found_as_by_looking_at_every_end(pieces: list[tuple[str, bool]], stops: list[str]) -> None:
    matcher, text, given_out = StopMatcher(stops), "", ""
    for piece, armed in pieces:
        expected = None
        for end in range(len(text) + 1, len(text) + len(piece) + 1) if armed else ():
            complete = [stop for stop in stops if (text + piece)[:end].endswith(stop)]
            if complete:
                expected = max(complete, key=len), (text + piece)[: end - max(map(len, complete))]
                break
        text += piece
        found = matcher.push(piece, armed=armed)
        if expected is not None:
            assert isinstance(found, StopMatch)
            assert (found.stop, given_out + found.text) == expected
            return
        assert isinstance(found, str)
        given_out += found
        held = max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))
        assert given_out == text[: len(text) - held]


def test_long_stop_texts_against_a_repeated_token_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps, border = 0, StopText.border_of

    def counted(stop: StopText, length: int) -> int:
        nonlocal num_steps
        num_steps += 1
        return border(stop, length)

    monkeypatch.setattr(StopText, "border_of", counted)
    stops = [" " * (4095 - number) + "x" for number in range(64)]
    matcher = StopMatcher(stops)
    given_out = "".join(str(matcher.push(" " * 32)) for _ in range(256))
    assert given_out == " " * (256 * 32 - 4095)
    assert num_steps <= len(stops) * 256 * 32  # at most once for each character and stop text
