"""Output items of ``/v1/responses``: messages, reasoning and calls of functions, and the events of their stream."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

from outrider.tokenization.output_parsing import CallArguments, CallStart, Content, Event, OutputParser

Json = dict[str, Any]
_TYPES: dict[type[Event], str] = {CallStart: "function_call", CallArguments: "function_call", Content: "message"}


def make_id(prefix: str) -> str:
    """A new id."""
    return f"{prefix}_{secrets.token_hex(12)}"


class OutputItems:
    """The output of one response. At most the last item is open."""

    def __init__(
        self, parser: OutputParser | None, *, make_call_id: Callable[[], str], max_calls: int | None = None
    ) -> None:
        """``max_calls``: calls past these are dropped."""
        self._parser, self._make_call_id, self._max_calls = parser, make_call_id, max_calls
        self._num_calls = 0
        self._is_open = False
        self.items: list[Json] = []

    def push(self, text: str, logprobs: list[Json]) -> Iterator[Json]:
        """Events of the next part of the output."""
        events = self._parser.push(text) if self._parser is not None else (Content(text),) if text else ()
        for event in events:
            yield from self._add(event, logprobs)

    def finish(self, status: str) -> Iterator[Json]:
        """Events of the end of the output; ``status`` of its last item: ``completed`` or ``incomplete``."""
        for event in self._parser.finish() if self._parser is not None else ():
            yield from self._add(event, [])
        if not self.items:
            yield from self._open("message", "")
        yield from self._close(status)

    def _add(self, event: Event, logprobs: list[Json]) -> Iterator[Json]:
        kind = _TYPES.get(type(event), "reasoning")
        if isinstance(event, CallStart):
            self._num_calls += 1
        if kind == "function_call" and self._max_calls is not None and self._num_calls > self._max_calls:
            return
        if isinstance(event, CallStart) or not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind, event.name if isinstance(event, CallStart) else "")
        if not isinstance(event, CallStart) and (event.text or logprobs):
            yield self._extend(event.text, logprobs)

    def _open(self, kind: str, name: str) -> Iterator[Json]:
        item: Json = {"type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"id": make_id("fc"), "call_id": self._make_call_id(), "name": name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"id": make_id("rs"), "summary": [], "content": []}
        else:
            item |= {"id": make_id("msg"), "role": "assistant", "content": []}
        self.items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", **self._place(), "item": _copied(item)}
        if kind != "function_call":
            part = {"type": "reasoning_text", "text": ""} if kind == "reasoning" else _output_text()
            item["content"].append(part)
            yield {"type": "response.content_part.added", **self._part_place(item), "part": _copied(part)}

    def _extend(self, text: str, logprobs: list[Json]) -> Json:
        item = self.items[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            return {"type": "response.function_call_arguments.delta", **self._place(), "delta": text} | _item_id(item)
        part = item["content"][0]
        part["text"] += text
        found = {"type": f"response.{part['type']}.delta", **self._part_place(item), "delta": text}
        if part["type"] == "output_text":
            part["logprobs"] += logprobs
            found["logprobs"] = logprobs
        return found

    def _close(self, status: str) -> Iterator[Json]:
        if not self._is_open:
            return
        item = self.items[-1]
        item["status"], self._is_open = status, False
        if item["type"] == "function_call":
            place = {**self._place(), **_item_id(item)}
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **named}
        else:
            part = item["content"][0]
            place = self._part_place(item)
            logprobs = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
            yield {"type": f"response.{part['type']}.done", **place, "text": part["text"], **logprobs}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", **self._place(), "item": item}

    def _place(self) -> Json:
        return {"output_index": len(self.items) - 1}

    def _part_place(self, item: Json) -> Json:
        return {**_item_id(item), "output_index": len(self.items) - 1, "content_index": 0}


def _item_id(item: Json) -> Json:
    return {"item_id": item["id"]}


def _output_text() -> Json:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copied(value: Json) -> Json:
    """A copy that later changes do not reach."""
    return {key: list(entry) if isinstance(entry, list) else entry for key, entry in value.items()}
