"""Output parsers: reasoning and tool calls in the text of a model, split off as it is generated.

A parser is an incremental state machine: ``push`` takes any part of the text and yields events, ``finish`` yields what
was held back. A whole text is one ``push``, so a streamed text gives the same events wherever it is cut. Parsers know
neither HTTP nor tokens.
"""

from outrider.tokenization.output_parsing.enforced import CallListParser, NamedCallParser
from outrider.tokenization.output_parsing.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    OutputParser,
    Reasoning,
)
from outrider.tokenization.output_parsing.parsed_output import ParsedOutput, ToolCall, parse_output
from outrider.tokenization.output_parsing.registry import (
    NO_PARSER,
    UNNAMED,
    OutputFormat,
    choose_format,
)
from outrider.tokenization.output_parsing.strict_calls import AnswerGrammar

__all__ = [
    "AnswerGrammar",
    "CallArguments",
    "CallListParser",
    "CallStart",
    "Content",
    "Event",
    "NO_PARSER",
    "NamedCallParser",
    "OutputFormat",
    "OutputParser",
    "ParsedOutput",
    "Reasoning",
    "ToolCall",
    "UNNAMED",
    "choose_format",
    "parse_output",
]
