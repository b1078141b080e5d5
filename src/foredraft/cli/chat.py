"""`foredraft chat`: a conversation with a model in the terminal."""

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.style import Style

from foredraft.cli.backend import CliBackend, CliGenerator, resolve_single_method
from foredraft.cli.options import ModelOptions, SamplingOptions, _make_option, with_options
from foredraft.cli.progress import ProgressBar
from foredraft.cli.prompts import read_template_file
from foredraft.cli.render import ORIGIN_STYLES, Screen
from foredraft.cli.shell import UsageError, print_line
from foredraft.cli.speculative_config import read_speculative_config
from foredraft.cli.speed_figures import SpeedFigures
from foredraft.errors import ForedraftError
from foredraft.outputs import Completion, Delta, Origin, Stats

if TYPE_CHECKING:
    from foredraft.sampling.params import Sampling

INPUT_PROMPT = "> "
HELP_TEXT = """\
/stats    speculation so far     /clear    forget the conversation    /undo      take back the last turn
/history  show the conversation  /system TEXT  set the system message  /save FILE  write it as JSON
/exit     leave (Ctrl-D too); Ctrl-C stops a reply"""


@dataclass(frozen=True)
class ChatOptions(SamplingOptions, ModelOptions):
    """Options of the command."""

    max_tokens: Annotated[int, _make_option("Longest reply, in tokens.", panel="Sampling")] = 1024
    system: Annotated[str | None, _make_option("System message of the conversation.", panel="Chat")] = None
    chat_template: Annotated[
        str | None,
        _make_option(
            "File with a Jinja template; 'plain' writes role: content lines.", panel="Chat", metavar="FILE|plain"
        ),
    ] = None
    no_color: Annotated[bool, _make_option("No colours; NO_COLOR does the same.", "--no-color", panel="Output")] = False


@with_options(ChatOptions)
def chat(ctx: typer.Context, options: ChatOptions) -> None:
    """Talk with a model. Drafted tokens that the model accepted are green; /help lists the commands.

    Without a terminal every line of standard input is one turn, and standard output receives the replies alone.
    """
    options = read_speculative_config(options)
    if options.n != 1 or options.logprobs is not None:
        raise UsageError("chat gives one reply at a time; leave --n and --logprobs out")
    screen = Screen(options.no_color)
    backend: CliBackend = ctx.obj or CliBackend()
    with contextlib.redirect_stdout(sys.stderr):
        with ProgressBar(screen.err, "loading"):
            sampling = options.build_sampling()
            template = read_template(options.chat_template)
            method = resolve_single_method(options, backend, "a chat")
            llm = backend.load(options, method)
        if template is None and not llm.has_chat_template:
            print_line("note: the model has no chat template; messages are written as 'role: content' lines")
            template = read_template("plain")
        ChatSession(llm, sampling, screen, template, options.system).run(_read_lines(screen))


def read_template(chosen: str | None) -> str | None:
    """Source of --chat-template; None = the model's own. Raises UsageError if the file cannot be read."""
    if chosen is None:
        return None
    if chosen == "plain":
        from foredraft.chat import PLAIN_TEMPLATE

        return PLAIN_TEMPLATE
    return read_template_file(chosen)


def _read_lines(screen: Screen) -> Iterator[str]:
    """Lines of the user. On a terminal with line editing; a line that ends with a backslash goes on."""
    if not screen.is_live or sys.stdin is None or not sys.stdin.isatty():
        for line in sys.stdin or ():
            yield line.rstrip("\n")
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() editing and a history
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
    """Make the completion of a reply that was stopped; None if it has no token yet.

    The number of draft tokens is unknown, so the reply has no part in the acceptance rate.
    """
    ids = [token for delta in deltas for token in delta.token_ids]
    passes = sum(bool(delta.token_ids) for delta in deltas)
    stats = Stats(num_tokens=len(ids), target_passes=passes, wall_time=seconds)
    return Completion("".join(delta.text for delta in deltas), ids, "abort", stats=stats) if ids else None


@dataclass
class ChatSession:
    """Messages so far, and the commands on them."""

    llm: CliGenerator
    sampling: "Sampling"
    screen: Screen
    template: str | None
    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)
    origins: Counter[Origin] = field(default_factory=Counter)
    seconds: float = 0.0

    def run(self, lines: Iterator[str]) -> None:
        """Answer every line until the end of input or /exit."""
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
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def run_command(self, line: str) -> None:
        """Carry out one /command."""
        name, _, argument = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self.screen.print_note(HELP_TEXT),
            "/stats": self._show_stats,
            "/history": self._show_history,
            "/clear": self._clear,
            "/undo": self._undo,
            "/system": self._set_system,
            "/save": self._save,
        }
        if name not in commands:
            self.screen.print_note(f"unknown command {name}; /help lists them")
            return
        commands[name](argument.strip())

    def reply(self, text: str) -> None:
        """Add one user message, and stream the answer. Ctrl-C keeps what was said so far."""
        self.turns.append({"role": "user", "content": text})
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
            for delta in self.llm.stream([prompt], self.sampling):
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

    def _encode_prompt(self) -> list[int]:
        """Prompt tokens; the oldest turns are left out if the context is too short for them and a reply."""
        dropped = 0
        while True:
            ids = self.llm.encode_chat(self.messages, chat_template=self.template)
            room = self.llm.context_length - len(ids)
            if room > min(self.sampling.max_tokens, self.llm.context_length // 4) or len(self.turns) <= 1:
                break
            del self.turns[:2]
            dropped += 1
        if dropped:
            self.screen.print_note(f"(the context is full: the oldest {dropped} turns were left out)", Style(dim=True))
        if room < 1:
            raise ForedraftError(
                f"the message has {len(ids)} tokens, the context {self.llm.context_length}; shorten it"
            )
        return ids

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
            self.screen.print_note(f"{message['role']}: {message['content']}")

    def _clear(self, _: str) -> None:
        self.turns.clear()
        self.screen.print_note("the conversation starts anew", Style(dim=True))

    def _undo(self, _: str) -> None:
        del self.turns[-2:]
        self.screen.print_note(f"{len(self.turns) // 2} turns are left", Style(dim=True))

    def _set_system(self, text: str) -> None:
        self.system = text or None
        self.screen.print_note("system message set" if text else "system message removed", Style(dim=True))

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
