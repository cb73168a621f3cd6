"""The parts of a whole output."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.tokenization.output_parsing.events import CallArguments, CallStart, Event, OutputParser, Reasoning


@dataclass(slots=True)
class ToolCall:
    """A tool call."""

    name: str
    arguments: str = ""
    """JSON, as the model wrote it; incomplete if the output was cut off."""


@dataclass(slots=True)
class ParsedOutput:
    """Reasoning, content and tool calls of an output."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Add the next event."""
        if isinstance(event, CallStart):
            self.calls.append(ToolCall(event.name))
        elif isinstance(event, CallArguments):
            self.calls[-1].arguments += event.text
        elif isinstance(event, Reasoning):
            self.reasoning += event.text
        else:
            self.content += event.text


def parse_output(parser: OutputParser, text: str) -> ParsedOutput:
    """Parse a whole output."""
    found = ParsedOutput()
    for event in (*parser.push(text), *parser.finish()):
        found.add(event)
    return found
