"""Exit codes and error lines of the commands.

An expected error is one line on standard error. Exit codes: 0 done, 1 failed, 2 invalid command line, 3 the
drafter given to `foredraft doctor` cannot save time or does not fit, 130 interrupted.
This file does not know about models.
"""

import os
import re
import sys
import warnings
from collections.abc import Sequence, Set
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from foredraft.cli.streams import STDOUT
from foredraft.cli.suggest import format_unknown_option, is_short_word
from foredraft.errors import ForedraftError

DONE, FAILED, MISUSED, UNFIT, INTERRUPTED = 0, 1, 2, 3, 130

# Click's base class of command-line errors. Typer does not export it, only its subclass BadParameter.
ClickUsageError: Any = typer.BadParameter.__bases__[0]
_ClickNoSuchOption: Any = next(kind for kind in ClickUsageError.__subclasses__() if kind.__name__ == "NoSuchOption")

_PAIR = re.compile(r"[^\s=-][^\s=]*=\S+")


class UsageError(ForedraftError):
    """Invalid command line, detected before a model is loaded."""


class RootGroup(TyperGroup):
    """Root command, which prints an expected error as one line; any other exception is a bug and propagates."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and raise SystemExit with its exit code, whatever the value of `standalone_mode`.

        Args:
            args: command line without the program name. Default None = that of the process.
            prog_name: ignored; the name is always "foredraft".
            complete_var: environment variable for shell completion.
            standalone_mode: ignored.
            windows_expand_args: expand patterns in arguments on Windows.
            extra: further arguments of typer.
        """
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                code = super().main(args, "foredraft", complete_var, False, windows_expand_args, **extra)
                sys.stdout.flush()
            except (KeyboardInterrupt, typer.Abort):
                code = INTERRUPTED
            except Exception as error:
                code = _report_error(error)
        raise SystemExit(code or DONE)


class Command(TyperCommand):
    """Command that rejects options of other programs with one dash and several letters, such as -ngl.

    Typer's parser would read -ngl as -n with the value gl.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises Click's NoSuchOption for an option of another program."""
        option_names = {name for parameter in self.params for name in parameter.opts}
        options_with_value = {name for p in self.params if not getattr(p, "is_flag", False) for name in p.opts}
        previous = ""
        for arg in args:
            if arg == "--":
                break
            name = arg.partition("=")[0]
            if is_short_word(name) and name not in option_names and previous not in options_with_value:
                raise _ClickNoSuchOption(name, ctx=ctx)
            previous = arg
        if not any(parameter.name == "prompt" for parameter in self.params):  # a text may look like KEY=VALUE
            of_pairs = [p for p in self.params if getattr(p, "multiple", False) and "=" in (p.metavar or "")]
            args = repeat_options(args, {name for parameter in of_pairs for name in parameter.opts})
        return super().parse_args(ctx, args)


def repeat_options(args: Sequence[str], options: Set[str]) -> list[str]:
    """Write an option before each of several values KEY=VALUE that follow it, as vLLM's command line takes adapters.

    Args:
        args: arguments of a command.
        options: names of the options that have such values.
    """
    found: list[str] = []
    for arg in args:
        if found[-2:-1] and found[-2] in options and "=" in found[-1] and _PAIR.fullmatch(arg):
            found.append(found[-2])
        found.append(arg)
    return found


def _report_error(error: Exception) -> int:
    """Print an expected error and return the exit code; raise any other error again."""
    if isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.filename == STDOUT):
        # The rest of the output cannot be written. Without this, the flush at exit fails too and prints a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return FAILED
    if isinstance(error, ClickUsageError):
        path = error.ctx.command_path if error.ctx else "foredraft"
        print_line(f"error: {_format_usage_error(error)} (try '{path} --help')")
        return MISUSED
    if isinstance(error, UsageError):
        print_line(f"error: {error}")
        return MISUSED
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        print_line(
            "error: out of memory; use fewer prompts at once, fewer --max-tokens, --dtype bfloat16 or a smaller model"
        )
        return FAILED
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        print_line(f"error: {error.filename}: {error.strerror.lower()}")
        return FAILED
    if isinstance(error, ForedraftError | OSError):
        print_line(f"error: {error}")
        return FAILED
    raise error


def _format_usage_error(error: Any) -> str:
    """Return the message of a command-line error; for an unknown option, with a suggestion."""
    if not isinstance(error, _ClickNoSuchOption):
        return str(error.format_message())
    option_names = [name for parameter in (error.ctx.command.params if error.ctx else ()) for name in parameter.opts]
    return format_unknown_option(error.option_name, option_names)


def print_line(line: str) -> None:
    """Print a message as one line on standard error; line breaks and control characters become spaces."""
    sys.stdout.flush()
    typer.echo("".join(c if c.isprintable() else " " for c in " ".join(line.split())), err=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print_line(f"warning: {message}")
