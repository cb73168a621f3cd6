"""``outrider generate``: streams one generation to the terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.options import (
    Address,
    AllowPlaintextToken,
    TlsCaFile,
    TlsCertFile,
    TlsKeyFile,
    TlsServerName,
    TokenFilePath,
    UseTls,
    connect,
    errors_as_lines,
    progress,
)
from outrider.cli.statistics import acceptance_rate, print_statistics
from outrider.client.requests import DEFAULT_RESUME_TIMEOUT_S
from outrider.config.client import DEFAULT_ADDRESS
from outrider.errors import InvalidRequestError
from outrider.generation import GenerationResult

Prompt = Annotated[str | None, typer.Argument(help="The prompt; - reads standard input.", show_default=False)]
_OFF = "off"


def _option(name: str, text: str, default: str = _OFF, *short: str) -> Any:  # noqa: ANN401 - typer's own type
    """An option whose default is the server's, which the help names."""
    return typer.Option(name, *short, help=f"{text} Default: {default}.", show_default=False)


def generate(
    prompt: Prompt = None,
    *,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a stream.")] = False,
    address: Address = DEFAULT_ADDRESS,
    tls: UseTls = False,
    tls_ca_file: TlsCaFile = None,
    tls_cert_file: TlsCertFile = None,
    tls_key_file: TlsKeyFile = None,
    tls_server_name: TlsServerName = None,
    token_file: TokenFilePath = None,
    allow_plaintext_token: AllowPlaintextToken = False,
    max_tokens: Annotated[
        int | None, _option("--max-tokens", "Maximum number of tokens to generate.", "up to the end of the context")
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Minimum number of tokens before the output may end.")] = 0,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", help="0 is greedy. Default: the model's, else 1.")
    ] = None,
    top_p: Annotated[
        float | None, _option("--top-p", "Nucleus sampling mass; 1 is off.", "the model's, else 1")
    ] = None,
    top_k: Annotated[
        int | None,
        _option("--top-k", "Number of most likely tokens that are kept; 0 keeps all.", "the model's, else 0"),
    ] = None,
    min_p: Annotated[
        float | None,
        _option("--min-p", "Drop tokens below this fraction of the largest probability.", "the model's, else 0"),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        _option("--repetition-penalty", "Values above 1 discourage repeated tokens.", "the model's, else 1"),
    ] = None,
    frequency_penalty: Annotated[float, typer.Option(help="Penalty per occurrence in the output, -2 to 2.")] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="Penalty for tokens in the output, -2 to 2.")] = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Bias of a token's logit. May be repeated.")
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-word", help="Text that is never completed. May be repeated.")
    ] = None,
    allowed_token_ids: Annotated[
        list[int] | None, typer.Option("--allowed-token-id", help="Token that may be drawn. May be repeated.")
    ] = None,
    seed: Annotated[int | None, _option("--seed", "Seed, which repeats a generation.", "random")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string. May be repeated.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Stop token. May be repeated.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue after an end of sequence.")] = False,
    include_stop_str_in_output: Annotated[bool, typer.Option("--include-stop-str-in-output")] = False,
    num_speculative_tokens: Annotated[
        int | None,
        _option("--num-speculative-tokens", "Maximum draft length; 0 turns speculation off.", "the server's", "-k"),
    ] = None,
    acceptance_method: Annotated[
        str | None, _option("--acceptance-method", "rejection, coupled or typical.", "the server's")
    ] = None,
    timeout: Annotated[float | None, _option("--timeout", "Deadline in seconds.", "none")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume after an interruption, at any of the addresses.")
    ] = False,
    resume_timeout: Annotated[
        float, typer.Option(help="Maximum duration of an interruption, in seconds.")
    ] = DEFAULT_RESUME_TIMEOUT_S,
    request_id: Annotated[str, typer.Option(help="Id of the request in logs.")] = "",
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt first.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics afterwards.")] = False,
) -> None:
    """Generate text and stream it to the terminal."""
    with (
        errors_as_lines(),
        connect(
            address,
            tls=tls,
            tls_ca_file=tls_ca_file,
            tls_cert_file=tls_cert_file,
            tls_key_file=tls_key_file,
            tls_server_name=tls_server_name,
            token_file=token_file,
            allow_plaintext_token=allow_plaintext_token,
        ) as client,
    ):
        text = read_prompt(prompt, file)
        if echo and not as_json:
            _write(text)
        result = None
        for delta in client.stream(
            text,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            logit_bias=_parse_bias(logit_bias),
            bad_words=bad_words,
            allowed_token_ids=allowed_token_ids or None,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            include_stop_str_in_output=include_stop_str_in_output,
            num_speculative_tokens=num_speculative_tokens,
            acceptance_method=acceptance_method,
            timeout=timeout,
            resume=resume,
            resume_timeout=resume_timeout,
            request_id=request_id or None,
        ):
            if not as_json:
                _write(delta.text)
            result = delta.result
        _write(f"{result_json(result)}\n" if as_json and result is not None else "\n")
        if stats and result is not None:
            print_statistics(progress, result)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt: the argument, standard input for "-", or a file."""
    if (prompt is None) == (file is None):
        raise InvalidRequestError("prompt", "should be a text, - for standard input, or --file PATH: one of them")
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        return sys.stdin.read() if prompt == "-" else prompt or ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError("prompt", f"{file or 'standard input'} cannot be read: {error}") from error


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
