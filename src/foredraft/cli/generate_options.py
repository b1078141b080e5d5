"""Options of `foredraft generate`."""

from dataclasses import dataclass, field
from typing import Annotated

import typer

from foredraft.cli.adapter_options import AdapterOptions
from foredraft.cli.options import SamplingOptions, _make_option


@dataclass(frozen=True)
class OutputOptions:
    """Options of the report of `foredraft generate`."""

    compare: Annotated[
        bool, _make_option("Measure every method against plain decoding.", "--compare", panel="Output")
    ] = False
    repeats: Annotated[
        int,
        typer.Option(help="Timed runs of each method with --compare.", rich_help_panel="Output", min=1),
    ] = 3
    as_json: Annotated[bool, _make_option("Print one JSON object on standard output.", "--json", panel="Output")] = (
        False
    )
    no_color: Annotated[
        bool,
        _make_option("Print without colours, as with NO_COLOR in the environment.", "--no-color", panel="Output"),
    ] = False


@dataclass(frozen=True)
class GenerateOptions(OutputOptions, SamplingOptions, AdapterOptions):
    """Options of `foredraft generate`."""

    prompt: Annotated[str | None, typer.Argument(help="Prompt; '-' reads standard input.")] = None
    prompt_option: Annotated[
        list[str] | None, _make_option("Prompt, as an option instead of an argument.", "--prompt", "-p", metavar="TEXT")
    ] = None
    chat: Annotated[
        bool, _make_option("Put each prompt into the model's chat template as a user message.", "--chat")
    ] = False
    image: Annotated[
        list[str] | None,
        _make_option(
            "Image for a vision-language model; repeatable. With --chat it stands before the prompt, otherwise the "
            "prompt has the model's placeholder for it.",
            metavar="PATH",
        ),
    ] = None
    file: Annotated[
        list[str],
        _make_option("Read a prompt from this file; repeatable, one prompt per file.", "--file", "-f", metavar="PATH"),
    ] = field(default_factory=list)
    prediction: Annotated[
        list[str] | None,
        _make_option(
            "File with the expected output, such as a text before a small edit; drafts are copied from it. One for all "
            "prompts, or repeated for each.",
            metavar="PATH",
        ),
    ] = None

    @property
    def num_images(self) -> int:
        """Number of --image."""
        return len(self.image or ())
