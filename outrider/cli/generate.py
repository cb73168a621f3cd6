"""``outrider generate``: streams one generation to the terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import SEED_HELP, progress
from outrider.cli.server_flags import ServerFlags
from outrider.cli.statistics import acceptance_rate, print_statistics
from outrider.client.requests import DEFAULT_RESUME_TIMEOUT_S, GenerateOptions
from outrider.errors import InvalidRequestError
from outrider.generation import GenerationResult
from outrider.types import FinishReason

Prompt = Annotated[str | None, typer.Argument(help="The prompt; - reads standard input.", show_default=False)]


def _option(panel: str, name: str, text: str, default: str, *short: str) -> Any:  # noqa: ANN401 - typer's own type
    """An option whose default is the server's, which the help names."""
    return typer.Option(name, *short, help=f"{text} Default: {default}.", show_default=False, rich_help_panel=panel)


def _plain(panel: str, text: str, *names: str, **more: Any) -> Any:  # noqa: ANN401
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_input, _sampling, _grammar, _length, _request, _output = (
    partial(_plain, panel)
    for panel in ("Input", "Sampling", "Structured output", "Length and stops", "Request", "Output")
)


@dataclass(frozen=True, slots=True)
class LengthFlags:
    """Length and end of the output."""

    max_tokens: Annotated[
        int | None,
        _option(
            "Length and stops", "--max-tokens", "Maximum number of tokens to generate.", "up to the end of the context"
        ),
    ] = None
    min_tokens: Annotated[int, _length("Minimum number of tokens before the output may end.")] = 0
    stop: Annotated[list[str] | None, _length("Stop string. May be repeated.")] = None
    stop_token_ids: Annotated[list[int] | None, _length("Stop token. May be repeated.", "--stop-token-id")] = None
    ignore_eos: Annotated[bool, _length("Continue after an end of sequence.", "--ignore-eos")] = False
    include_stop_str_in_output: Annotated[
        bool, _length("Keep the stop string in the output.", "--include-stop-str-in-output")
    ] = False

    def options(self) -> GenerateOptions:
        """Options of the SDK."""
        return cast("GenerateOptions", _values(self))


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """Sampling of tokens."""

    temperature: Annotated[
        float | None, _sampling("0 is greedy. Default: the model's, else 1.", "--temperature", "-t")
    ] = None
    top_p: Annotated[
        float | None, _option("Sampling", "--top-p", "Nucleus sampling mass; 1 is off.", "the model's, else 1")
    ] = None
    top_k: Annotated[
        int | None,
        _option(
            "Sampling", "--top-k", "Number of most likely tokens that are kept; 0 keeps all.", "the model's, else 0"
        ),
    ] = None
    min_p: Annotated[
        float | None,
        _option(
            "Sampling", "--min-p", "Drop tokens below this fraction of the largest probability.", "the model's, else 0"
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _option(
            "Sampling", "--repetition-penalty", "Values above 1 discourage repeated tokens.", "the model's, else 1"
        ),
    ] = None
    frequency_penalty: Annotated[float, _sampling("Penalty per occurrence in the output, -2 to 2.")] = 0.0
    presence_penalty: Annotated[float, _sampling("Penalty for tokens in the output, -2 to 2.")] = 0.0
    logit_bias: Annotated[
        list[str] | None, _sampling("Bias of a token's logit. May be repeated.", metavar="ID=BIAS")
    ] = None
    bad_words: Annotated[
        list[str] | None, _sampling("Text that is never completed. May be repeated.", "--bad-word")
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, _sampling("Token that may be drawn. May be repeated.", "--allowed-token-id")
    ] = None
    seed: Annotated[int | None, _option("Sampling", "--seed", SEED_HELP, "random")] = None

    def options(self) -> GenerateOptions:
        """Options of the SDK."""
        parsed = {"logit_bias": _parse_bias(self.logit_bias), "allowed_token_ids": self.allowed_token_ids or None}
        return cast("GenerateOptions", _values(self) | parsed)


@dataclass(frozen=True, slots=True)
class GrammarFlags:
    """Structured output."""

    json_schema: Annotated[
        Path | None, _grammar("File with a JSON schema that the output keeps to.", "--json-schema", metavar="FILE")
    ] = None
    regex: Annotated[str | None, _grammar("Regular expression that the whole output matches.", "--regex")] = None
    choice: Annotated[list[str] | None, _grammar("Text that the output may be. May be repeated.", "--choice")] = None
    grammar: Annotated[
        Path | None, _grammar("File with a grammar in the form of Lark or GBNF.", "--grammar", metavar="FILE")
    ] = None

    def options(self) -> GenerateOptions:
        """Options of the SDK; ``InvalidRequestError`` for a file that cannot be read."""
        return GenerateOptions(
            json_schema=_read("json_schema", self.json_schema),
            regex=self.regex,
            choice=self.choice or None,
            grammar=_read("grammar", self.grammar),
        )


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """Speculation, deadline and identity of the request."""

    num_speculative_tokens: Annotated[
        int | None,
        _option(
            "Speculation",
            "--num-speculative-tokens",
            "Maximum draft length; 0 turns speculation off.",
            "the server's",
            "-k",
        ),
    ] = None
    acceptance_method: Annotated[
        str | None, _option("Speculation", "--acceptance-method", "rejection, coupled or typical.", "the server's")
    ] = None
    timeout: Annotated[float | None, _option("Request", "--timeout", "Deadline in seconds.", "none")] = None
    resume: Annotated[bool, _request("Resume after an interruption, at any of the addresses.", "--resume")] = False
    resume_timeout: Annotated[float, _request("Maximum duration of an interruption, in seconds.")] = (
        DEFAULT_RESUME_TIMEOUT_S
    )
    request_id: Annotated[str, _request("Id of the request in logs.")] = ""

    def options(self) -> GenerateOptions:
        """Options of the SDK."""
        return cast("GenerateOptions", _values(self) | {"request_id": self.request_id or None})


@with_flag_groups
def generate(
    prompt: Prompt = None,
    *,
    file: Annotated[Path | None, _input("Read the prompt from a file.", "--file", "-f")] = None,
    as_json: Annotated[bool, _output("Print one JSON object instead of a stream.", "--json")] = False,
    server: ServerFlags,
    length: LengthFlags,
    sampling: SamplingFlags,
    grammar: GrammarFlags,
    request: RequestFlags,
    echo: Annotated[bool, _output("Print the prompt first.", "--echo")] = False,
    stats: Annotated[bool, _output("Print statistics afterwards.", "--stats")] = False,
) -> None:
    """Generate text and stream it to the terminal."""
    with server.connect() as client:
        text = read_prompt(prompt, file)
        if echo and not as_json:
            _write(text)
        result = None
        options = length.options() | sampling.options() | grammar.options() | request.options()
        for delta in client.stream(text, **options):
            if not as_json:
                _write(delta.text)
            result = delta.result
        _write(f"{result_json(result)}\n" if as_json and result is not None else "\n")
        if result is not None and result.finish_reason is FinishReason.LENGTH and any(grammar.options().values()):
            count = result.usage.completion_tokens
            progress.print(f"the output was cut after {count} tokens, and may not match its grammar", style="yellow")
        if stats and result is not None:
            print_statistics(progress, result)


def _values(flags: Any) -> dict[str, Any]:  # noqa: ANN401 - a group of flags
    """Fields of a group by their names."""
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt: the argument, standard input for "-", or a file."""
    if (prompt is None) == (file is None):
        raise InvalidRequestError("prompt", "should be a text, - for standard input, or --file PATH: one of them")
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        return sys.stdin.read() if prompt == "-" else prompt or ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("prompt", f"{file or 'standard input'} cannot be read: {_reason(error)}") from error


def _read(option: str, file: Path | None) -> str | None:
    """The text of an option's file."""
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(option, f"{file} cannot be read: {_reason(error)}") from error


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """The error without the path, which the caller names."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def result_json(result: GenerationResult) -> str:
    """The result as one JSON object."""
    facts = dataclasses.asdict(result)
    facts["speculation"]["acceptance_rate"] = acceptance_rate(result.speculation)
    return json.dumps(facts)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _parse_bias(options: list[str] | None) -> dict[int, float] | None:
    return dict(_parse_one_bias(option) for option in options) if options else None


def _parse_one_bias(option: str) -> tuple[int, float]:
    token_id, _, bias = option.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise InvalidRequestError("logit_bias", f"should be ID=BIAS, not {option!r}") from None
