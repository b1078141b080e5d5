"""Option `--spec-simulate`: a simulated drafter in place of the options that name one."""

from dataclasses import replace
from typing import TypeVar

from foredraft.cli.options import ModelOptions
from foredraft.cli.shell import UsageError
from foredraft.cli.speculative_config import read_speculative_config

Options = TypeVar("Options", bound=ModelOptions)
METHOD_PATH = "foredraft.simulation:METHOD"  # as that module names itself; importing it would import torch
RATE_OPTION = "acceptance_rate"
# Options that describe a real drafter or its verification.
EXCLUDED_FIELDS = (
    "spec_method",
    "spec_model",
    "spec_quantization",
    "spec_dtype",
    "spec_revision",
    "spec_max_model_len",
    "spec_vocab",
    "speculative_config",
    "verify",
    "posterior_threshold",
    "posterior_alpha",
)


def read_drafter_options(options: Options) -> Options:
    """Return the options with --spec-simulate and --speculative-config turned into a method and its settings.

    Raises:
        UsageError: a value is invalid, or two options exclude each other.
    """
    return read_speculative_config(apply_simulation(options))


def apply_simulation(options: Options) -> Options:
    """Return the options with the method of --spec-simulate, which stays set for messages.

    Raises:
        UsageError: the rate is not in [0, 1], or another option describes a drafter.
    """
    rate = options.spec_simulate
    if rate is None:
        return options
    if not 0 <= rate <= 1:
        raise UsageError(f"--spec-simulate takes an acceptance rate from 0 to 1, such as 0.8, got {rate:g}")
    default = ModelOptions()
    given = [name for name in EXCLUDED_FIELDS if getattr(options, name) != getattr(default, name)]
    if given:
        raise UsageError(
            f"--spec-simulate drafts without a drafter and accepts at a rate; leave --{given[0].replace('_', '-')} out"
        )
    if RATE_OPTION in options.method_options:
        raise UsageError(f"--spec-simulate is the {RATE_OPTION}; leave --spec-option {RATE_OPTION} out")
    settings = [*(options.spec_option or []), f"{RATE_OPTION}={rate!r}"]
    return replace(options, spec_method=[METHOD_PATH], spec_option=settings)


def describe_simulation(rate: float) -> str:
    """Return the note that goes with every simulated output."""
    return f"acceptance simulated at {rate:g}: the text is simulated, not the model's"
