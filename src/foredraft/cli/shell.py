"""How a command behaves as a process: exit codes, one line for each mistake, a quiet Ctrl-C.

This file knows nothing of models. Codes: 0 done, 1 failed, 2 the command line was wrong, 130 interrupted.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from foredraft.cli.streams import STDOUT
from foredraft.cli.suggest import format_unknown_option, is_short_word
from foredraft.errors import ForedraftError

DONE, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130

# The base of every complaint about a command line; typer exports only this child of it.
_ClickUsageError: Any = typer.BadParameter.__bases__[0]
_ClickNoSuchOption: Any = next(kind for kind in _ClickUsageError.__subclasses__() if kind.__name__ == "NoSuchOption")


class UsageError(ForedraftError):
    """The command line is wrong, which shows before a model is loaded."""


class RootGroup(TyperGroup):
    """The root command. A foreseeable error becomes one line on standard error; anything else is our bug and raises."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run and leave by SystemExit, whatever `standalone_mode` says."""
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
    """A command that refuses other programs' options with one dash and several letters, such as -ngl.

    The parser would read -ngl as -n with the value gl.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; raises the parser's own NoSuchOption."""
        known = {name for parameter in self.params for name in parameter.opts}
        valued = {name for p in self.params if not getattr(p, "is_flag", False) for name in p.opts}
        before = ""
        for word in args:
            if word == "--":
                break
            name = word.partition("=")[0]
            if is_short_word(name) and name not in known and before not in valued:
                raise _ClickNoSuchOption(name, ctx=ctx)
            before = word
        return super().parse_args(ctx, args)


def _report_error(error: Exception) -> int:
    if isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.filename == STDOUT):
        # what is left of the output has nowhere to go; a second failing flush at exit would print a traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return FAILED
    if isinstance(error, _ClickUsageError):
        path = error.ctx.command_path if error.ctx else "foredraft"
        print_line(f"error: {_format_usage_error(error)} (try '{path} --help')")
        return MISUSED
    if isinstance(error, UsageError):
        print_line(f"error: {error}")
        return MISUSED
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        print_line(
            "error: out of memory; take fewer prompts at once, fewer --max-tokens, --dtype bfloat16 or a smaller model"
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
    """The message of a wrong command line; an unknown option with the one that was probably meant."""
    if not isinstance(error, _ClickNoSuchOption):
        return str(error.format_message())
    known = [name for parameter in (error.ctx.command.params if error.ctx else ()) for name in parameter.opts]
    return format_unknown_option(error.option_name, known)


def print_line(line: str) -> None:
    """One line on standard error, whatever line breaks and control characters the message brought along."""
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
