"""Reasoning between ``<think>`` and ``</think>``, as Qwen3 and the models distilled from DeepSeek-R1 write it."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.tokenization.output_parsing.events import Content, Event, OutputParser, Reasoning, split_at

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_CALL = "<tool_call>"


class ThinkParser:
    """Splits off the reasoning and passes the rest on to another parser.

    ``prompt_end``: end of the prompt, which may open the reasoning or close an empty one. Otherwise the text itself
    says whether it begins with reasoning; ``is_assumed``: it does, also where ``<think>`` is left out. ``calls``: what
    follows ``<tool_call>`` in a call, which ends the reasoning too; empty if none does.
    """

    def __init__(self, inner: OutputParser, prompt_end: str, *, is_assumed: bool, calls: tuple[str, ...] = ()) -> None:
        self._inner, self._is_assumed, self._calls = inner, is_assumed, calls
        self._endings = (THINK_CLOSE, _CALL) if calls else (THINK_CLOSE,)
        prompt_end = prompt_end.rstrip()
        self._is_reasoning: bool | None = None
        """None: not known yet."""
        if prompt_end.endswith(THINK_OPEN):
            self._is_reasoning = True
        elif prompt_end.endswith(THINK_CLOSE):
            self._is_reasoning = False
        self._may_open = self._is_reasoning is not False
        """True if ``<think>`` may come next."""
        self._held = ""

    def push(self, text: str) -> Iterator[Event]:
        """Events of the next part of the text."""
        yield from self._read(text, is_final=False)

    def finish(self) -> Iterator[Event]:
        """Events of the text that was held back."""
        yield from self._read("", is_final=True)
        yield from self._inner.finish()

    def _read(self, text: str, *, is_final: bool) -> Iterator[Event]:
        text, self._held = self._held + text, ""
        if self._may_open:
            begun = text.lstrip()
            if len(begun) < len(THINK_OPEN) and THINK_OPEN.startswith(begun) and not is_final:
                self._held = text
                return
            self._may_open = False
            opens = begun.startswith(THINK_OPEN)
            text = begun[len(THINK_OPEN) :] if opens else text
            if self._is_reasoning is None:
                self._is_reasoning = opens or self._is_assumed
        while self._is_reasoning:
            reasoning, ending, text = split_at(text, self._endings, is_final=is_final)
            if ending == _CALL:
                following = text.lstrip()
                is_call = following.startswith(self._calls)
                if not is_call and (is_final or not any(begin.startswith(following) for begin in self._calls)):
                    yield Reasoning(reasoning + _CALL)  # the marker is spoken of
                    continue
                ending, text = _CALL if is_call else "", _CALL + text
            if reasoning:
                yield Reasoning(reasoning)
            if not ending:
                self._held = text
                return
            self._is_reasoning = False
        if text:
            yield from self._inner.push(text)


class ContentParser:
    """Parser of a text without tool calls."""

    def push(self, text: str) -> Iterator[Event]:
        """The text."""
        yield Content(text)

    def finish(self) -> Iterator[Event]:
        """Nothing is held back."""
        yield from ()
