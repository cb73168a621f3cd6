"""``outrider chat``: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from functools import partial
from typing import Annotated, Any

import typer

from outrider.cli.flag_groups import with_flag_groups
from outrider.cli.options import SEED_HELP, progress
from outrider.cli.server_flags import ServerFlags
from outrider.cli.statistics import print_statistics
from outrider.client import Client
from outrider.errors import DeadlineError, ModelError, OutriderError
from outrider.generation import Delta, GenerationResult

_PROMPT = "> "
_FORGET, _LEAVE, _SHOW_HELP = "/clear", "/exit", "/help"
_IN_CONFIG = b'"chat_template"'
_HELP = f"Ctrl-C stops an answer, {_FORGET} begins anew, {_LEAVE} or Ctrl-D leaves, {_SHOW_HELP} shows this."


def _flag(panel: str, text: str, *names: str) -> Any:  # noqa: ANN401 - typer's own type
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=panel)


_conversation, _sampling, _speculation = (
    partial(_flag, panel) for panel in ("Conversation", "Sampling", "Speculation")
)


@with_flag_groups
def chat(
    message: Annotated[str | None, typer.Argument(help="The first message.", show_default=False)] = None,
    *,
    server: ServerFlags,
    system: Annotated[str | None, _conversation("System message.", "--system", "-s")] = None,
    max_tokens: Annotated[int | None, _conversation("Maximum number of tokens of an answer.")] = None,
    temperature: Annotated[
        float | None, _sampling("0 is greedy. Default: the model's, else 1.", "--temperature", "-t")
    ] = None,
    top_p: Annotated[float | None, _sampling("Nucleus sampling mass; 1 is off. Default: the model's, else 1.")] = None,
    top_k: Annotated[
        int | None, _sampling("Number of most likely tokens that are kept; 0 keeps all. Default: the model's, else 0.")
    ] = None,
    seed: Annotated[int | None, _sampling(f"{SEED_HELP} Default: random.")] = None,
    num_speculative_tokens: Annotated[
        int | None,
        _speculation(
            "Maximum draft length; 0 turns speculation off. Default: the server's.", "--num-speculative-tokens", "-k"
        ),
    ] = None,
    acceptance_method: Annotated[
        str | None, _speculation("rejection, coupled or typical. Default: the server's.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print statistics after each answer.")] = False,
) -> None:
    """Chat with a model that has a chat template. Answers are streamed."""
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "num_speculative_tokens": num_speculative_tokens,
        "acceptance_method": acceptance_method,
    }
    with server.connect() as client:
        conversation = ChatSession(
            client, system, {name: value for name, value in options.items() if value is not None}
        )
        if message is None:
            _check_template(client)
        for said in _messages(message):
            if said == _FORGET:
                conversation.clear()
            else:
                _answer(conversation, said, stats=stats)


def _check_template(client: Client) -> None:
    """Raise ``ModelError`` for a model without a chat template, before its user writes a message. Reads no JSON: the
    base install has no library for templates.
    """
    try:
        files = client.tokenizer_files().files
    except DeadlineError:  # a slow connection, over which messages are still short
        return
    if not any("chat_template" in name for name in files) and _IN_CONFIG not in files.get("tokenizer_config.json", b""):
        raise ModelError(
            "the model has no chat template: serve it with --chat-template FILE, or use `outrider generate`"
        )


class ChatSession:
    """The messages of a conversation, and the client."""

    def __init__(self, client: Client, system: str | None, options: dict[str, Any]) -> None:
        self._client, self._options = client, options
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._first)

    def clear(self) -> None:
        """Clear the conversation, keeping the system message."""
        self.messages = list(self._first)

    def ask(self, said: str) -> Generator[Delta, None, None]:
        """Stream the answer. A stopped answer is kept as far as it came; a failed one is not."""
        asked = [*self.messages, {"role": "user", "content": said}]
        texts: list[str] = []
        try:
            with contextlib.closing(self._client.stream(messages=asked, **self._options)) as deltas:
                for delta in deltas:
                    texts.append(delta.text)
                    yield delta
        except OutriderError:
            raise
        except BaseException:
            self._keep(asked, texts)
            raise
        self._keep(asked, texts)

    def _keep(self, asked: list[dict[str, str]], texts: list[str]) -> None:
        self.messages = [*asked, {"role": "assistant", "content": "".join(texts)}]


def _messages(first: str | None) -> Iterator[str]:
    """The user's messages: the argument, then lines of standard input until its end."""
    if first is not None:
        yield first
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() its line editor
        progress.print(_HELP, style="dim", markup=False)
    while True:
        try:
            said = input(_PROMPT if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            progress.print(f"\n{_HELP}", style="dim", markup=False)
            continue
        if said == _LEAVE:
            return
        if said == _SHOW_HELP:
            progress.print(_HELP, style="dim", markup=False)
        elif said:
            yield said


def _answer(conversation: ChatSession, said: str, *, stats: bool) -> None:
    result: GenerationResult | None = None
    try:
        with contextlib.closing(conversation.ask(said)) as deltas:
            for delta in deltas:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                result = delta.result
    except KeyboardInterrupt:
        progress.print(" (stopped)", style="dim", markup=False)
        return
    except OutriderError as error:
        if not sys.stdin.isatty():
            raise
        progress.print(f"error: {error}", style="red", markup=False)
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    if stats and result is not None:
        print_statistics(progress, result)
