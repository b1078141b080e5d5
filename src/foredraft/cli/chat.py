"""`foredraft chat`: a conversation with a model in the terminal.

`ChatSession` holds the messages; decoding is in `LLM`.
"""

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.style import Style

from foredraft.cli.adapter_options import AdapterOptions
from foredraft.cli.backend import CliBackend, CliGenerator, resolve_single_method
from foredraft.cli.options import SamplingOptions, _make_option, with_options
from foredraft.cli.progress import ProgressBar
from foredraft.cli.prompts import read_template_file
from foredraft.cli.render import ORIGIN_STYLES, Screen
from foredraft.cli.shell import UsageError, print_line
from foredraft.cli.simulation import describe_simulation, read_drafter_options
from foredraft.cli.speed_figures import SpeedFigures
from foredraft.errors import ForedraftError
from foredraft.outputs import Completion, Delta, Origin, Stats

if TYPE_CHECKING:
    from foredraft.cli.backend import CliPrompt
    from foredraft.request_options import RequestOptions
    from foredraft.sampling.params import Sampling

INPUT_PROMPT = "> "
HELP_TEXT = """\
/stats    show the speed figures  /clear        delete the conversation  /undo       delete the last turn
/history  show the conversation   /system TEXT  set the system message   /save FILE  write the conversation as JSON
/image FILE  add an image to the next message, with --max-images
/exit     leave (Ctrl-D too); Ctrl-C stops a reply"""
REPLY_RESERVE_DIVISOR = 4  # up to 1/4 of the context is kept free for a reply, by dropping the oldest turns


@dataclass(frozen=True)
class ChatOptions(SamplingOptions, AdapterOptions):
    """Options of `foredraft chat`."""

    max_tokens: Annotated[int, _make_option("Longest reply, in tokens.", panel="Sampling")] = 1024
    system: Annotated[str | None, _make_option("System message of the conversation. Default: none.", panel="Chat")] = (
        None
    )
    chat_template: Annotated[
        str | None,
        _make_option(
            "File with a Jinja chat template; 'plain' writes lines of the form role: content. Default: the model's "
            "template, else plain.",
            panel="Chat",
            metavar="FILE|plain",
        ),
    ] = None
    max_images: Annotated[
        int,
        typer.Option(
            help="Most images of the conversation, for a vision-language model; /image FILE adds one. 0 leaves its "
            "image part out.",
            rich_help_panel="Chat",
            min=0,
            max=64,
        ),
    ] = 0
    no_color: Annotated[
        bool,
        _make_option("Print without colours, as with NO_COLOR in the environment.", "--no-color", panel="Output"),
    ] = False

    @property
    def num_images(self) -> int:
        """Images of the conversation at most."""
        return self.max_images


@with_options(ChatOptions)
def chat(ctx: typer.Context, options: ChatOptions) -> None:
    """Chat with a model in the terminal.

    Accepted draft tokens are green; /help lists the commands of the conversation. If standard input is not a terminal,
    each of its lines is one turn. Standard output receives the replies only.
    """
    options = read_drafter_options(options)
    if options.n != 1 or options.logprobs is not None:
        raise UsageError("a chat has one reply at a time; leave --n and --logprobs out")
    screen = Screen(options.no_color)
    backend: CliBackend = ctx.obj or CliBackend()
    with contextlib.redirect_stdout(sys.stderr):
        with ProgressBar(screen.err, "loading"):
            sampling = options.build_sampling()
            template = read_template(options.chat_template)
            method, request_options = resolve_single_method(options, backend, "a chat"), options.build_request_options()
            llm = backend.load(options, method)
        if template is None and not llm.has_chat_template:
            print_line("note: the model has no chat template; messages are written as 'role: content' lines")
            template = read_template("plain")
        if options.spec_simulate is not None:
            print_line(f"note: {describe_simulation(options.spec_simulate)}")
        session = ChatSession(llm, sampling, request_options, screen, template, options.system, options.max_images)
        session.run(_read_lines(screen))


def read_template(name: str | None) -> str | None:
    """Return the source of --chat-template; None = the model's template. Raises UsageError for an unreadable file."""
    if name is None:
        return None
    if name == "plain":
        from foredraft.chat import PLAIN_TEMPLATE

        return PLAIN_TEMPLATE
    return read_template_file(name)


def _read_lines(screen: Screen) -> Iterator[str]:
    """Yield the lines of standard input.

    On a terminal, lines can be edited, and a line that ends with a backslash continues on the next one.
    """
    if not screen.is_live or sys.stdin is None or not sys.stdin.isatty():
        for line in sys.stdin or ():
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - adds line editing and a history to input()
    while True:
        try:
            line = _read_input(INPUT_PROMPT)
            while line.endswith("\\"):
                line = line[:-1] + "\n" + _read_input("… ")
        except (EOFError, KeyboardInterrupt):
            screen.print_note("")
            return
        yield line


def _read_input(prompt: str) -> str:
    with contextlib.redirect_stdout(sys.__stdout__ or sys.stdout):
        return input(prompt)


def _make_stopped_completion(deltas: Sequence[Delta], seconds: float) -> Completion | None:
    """Return the completion of an interrupted reply; None if it has no token.

    The number of draft tokens is unknown, so the reply does not count in the acceptance rate.
    """
    ids = [token for delta in deltas for token in delta.token_ids]
    passes = sum(bool(delta.token_ids) for delta in deltas)
    stats = Stats(num_tokens=len(ids), target_passes=passes, wall_time=seconds)
    return Completion("".join(delta.text for delta in deltas), ids, "abort", stats=stats) if ids else None


@dataclass
class ChatSession:
    """Messages and figures of a conversation, and the /commands that change them."""

    llm: CliGenerator
    sampling: "Sampling"
    request_options: "RequestOptions"
    screen: Screen
    template: str | None
    system: str | None
    max_images: int = 0
    turns: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)  # paths, of the next message
    completions: list[Completion] = field(default_factory=list)
    origins: Counter[Origin] = field(default_factory=Counter)
    seconds: float = 0.0

    def run(self, lines: Iterator[str]) -> None:
        """Reply to every line until the end of the input or /exit."""
        if self.screen.is_live:
            self.screen.print_note("/help lists the commands", Style(dim=True))
        for line in lines:
            if not line.strip():
                continue
            if line.startswith("/"):
                if line.split()[0] in ("/exit", "/quit"):
                    return
                self.run_command(line)
            else:
                self.reply(line)

    @property
    def messages(self) -> list[dict[str, Any]]:
        system: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def run_command(self, line: str) -> None:
        """Run one /command."""
        name, _, argument = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self.screen.print_note(HELP_TEXT),
            "/stats": self._show_stats,
            "/history": self._show_history,
            "/clear": self._clear,
            "/undo": self._undo,
            "/system": self._set_system,
            "/save": self._save,
            "/image": self._add_image,
        }
        if name not in commands:
            self.screen.print_note(f"unknown command {name}; /help lists the commands")
            return
        commands[name](argument.strip())

    def reply(self, text: str) -> None:
        """Add a user message and stream the reply. Ctrl-C stops the reply and keeps its text in the conversation."""
        self.turns.append({"role": "user", "content": self._add_parts(text)})
        self.images = []  # a refused one must not stand in every later message
        try:
            prompt = self._encode_prompt()
        except ForedraftError as error:
            self.turns.pop()
            self.screen.print_note(f"error: {error}")
            return
        deltas: list[Delta] = []
        completion = None
        began = time.perf_counter()
        try:
            for delta in self.llm.stream([prompt], self.sampling, options=[self.request_options]):
                deltas.append(delta)
                self.origins.update(delta.origins)
                styles = [ORIGIN_STYLES[origin] for origin in delta.origins]
                self.screen.write_text(list(zip(delta.pieces, styles, strict=False)))
                completion = delta.completion or completion
        except KeyboardInterrupt:
            self.screen.print_note(" (stopped)", Style(dim=True))
            completion = completion or _make_stopped_completion(deltas, time.perf_counter() - began)
        self.screen.write_text([("\n", Style())])
        self.turns.append({"role": "assistant", "content": "".join(delta.text for delta in deltas)})
        if completion is not None:
            self.completions.append(completion)
            self.seconds += completion.stats.wall_time
            if completion.error is not None:
                self.screen.print_note(f"error: {completion.error}")

    def _add_parts(self, text: str) -> str | list[dict[str, str]]:
        """Return the content of a message: its text, or parts with the images before it."""
        images = [{"type": "image", "image": path} for path in self.images]
        return [*images, {"type": "text", "text": text}] if images else text

    def _encode(self) -> "tuple[CliPrompt, int]":
        """Return the prompt of the conversation and its number of tokens."""
        if not any(isinstance(message["content"], list) for message in self.turns):
            ids = self.llm.encode_chat(self.messages, chat_template=self.template)
            return ids, len(ids)
        prompt = self.llm.encode_image_chat(self.messages, chat_template=self.template)
        return prompt, len(prompt.tokens)

    def _encode_prompt(self) -> "CliPrompt":
        """Return the prompt; drop the oldest turns if the context is too short for them and a reply."""
        num_dropped = 0
        while True:
            prompt, num_tokens = self._encode()
            num_free = self.llm.context_length - num_tokens
            reserve = min(self.sampling.max_tokens, self.llm.context_length // REPLY_RESERVE_DIVISOR)
            if num_free > reserve or len(self.turns) <= 1:
                break
            del self.turns[:2]
            num_dropped += 1
        if num_dropped:
            self.screen.print_note(
                f"(the context is full: the oldest {num_dropped} turns were left out)", Style(dim=True)
            )
        if num_free < 1:
            raise ForedraftError(
                f"the message has {num_tokens} tokens, the context {self.llm.context_length}; shorten it"
            )
        return prompt

    def _show_stats(self, _: str) -> None:
        if not self.completions:
            self.screen.print_note("no reply yet")
            return
        self.screen.print_legend(self.origins)
        self.screen.print_note(
            f"{self.llm.drafter_name}: {SpeedFigures.from_completions(self.completions, self.seconds).summary}"
        )

    def _show_history(self, _: str) -> None:
        for message in self.messages:
            content = message["content"]
            parts = [content] if isinstance(content, str) else [part.get("text") or part["image"] for part in content]
            self.screen.print_note(f"{message['role']}: {' '.join(parts)}")

    def _clear(self, _: str) -> None:
        self.turns.clear()
        self.images.clear()
        self.screen.print_note("conversation deleted", Style(dim=True))

    def _undo(self, _: str) -> None:
        del self.turns[-2:]
        self.screen.print_note(f"{len(self.turns) // 2} turns are left", Style(dim=True))

    def _set_system(self, text: str) -> None:
        self.system = text or None
        self.screen.print_note("system message set" if text else "system message removed", Style(dim=True))

    def _add_image(self, path: str) -> None:
        if not path:
            self.screen.print_note("give a file: /image FILE")
        elif not self.max_images:
            self.screen.print_note("error: this chat reads no images; start it with --max-images N")
        elif not Path(path).expanduser().is_file():
            self.screen.print_note(f"error: there is no file {path}; give another path")
        else:
            self.images.append(path)
            self.screen.print_note(f"images of the next message: {', '.join(self.images)}", Style(dim=True))

    def _save(self, name: str) -> None:
        if not name:
            self.screen.print_note("give a file: /save FILE")
            return
        try:
            Path(name).expanduser().write_text(
                json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
            )
        except OSError as error:
            self.screen.print_note(f"error: {name} cannot be written: {error.strerror}")
            return
        self.screen.print_note(f"saved {len(self.messages)} messages to {name}", Style(dim=True))
