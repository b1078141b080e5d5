"""Translation of vLLM's `--speculative-config` into the options of Foredraft."""

import json
from dataclasses import replace
from typing import TypeVar

from foredraft.cli.options import ModelOptions
from foredraft.cli.shell import UsageError
from foredraft.errors import ForedraftError

Options = TypeVar("Options", bound=ModelOptions)
OPTION_NAME = "--speculative-config"
RULE_FIELD = "rejection_sample_method"  # vLLM's field for the verification rule
# key of the JSON object -> field of ModelOptions
OPTION_FIELDS = {
    "method": "spec_method",
    "model": "spec_model",
    "num_speculative_tokens": "spec_tokens",
    "verify": "verify",
    "posterior_threshold": "posterior_threshold",
    "posterior_alpha": "posterior_alpha",
}
LISTS = ("spec_method", "spec_model")  # fields that hold a list
TEXTS = ("spec_tokens", "verify")  # fields that hold a text


def read_speculative_config(options: Options) -> Options:
    """Return the options with the entries of --speculative-config moved to their own fields.

    Args:
        options: options of a command. Keys without a field become settings of the method (--spec-option).

    Raises:
        UsageError: the value is not a JSON object, or an entry is given as an option too.
    """
    if options.speculative_config is None:
        return options
    try:
        config = json.loads(options.speculative_config)
    except json.JSONDecodeError as error:
        raise UsageError(f"{OPTION_NAME} is not JSON ({error.msg}: character {error.pos})") from None
    if not isinstance(config, dict):
        raise UsageError(
            f'{OPTION_NAME} takes a JSON object such as {{"method": "ngram", "num_speculative_tokens": 4}}'
        )
    changes: dict[str, object] = {"speculative_config": None}
    settings = list(options.spec_option or [])
    given = set(config)
    if config.get(RULE_FIELD) is not None:
        config = {name: value for name, value in config.items() if name != RULE_FIELD} | _translate_rule(config)
    for key, value in config.items():
        if key not in OPTION_FIELDS:
            settings.append(f"{key}={json.dumps(value)}")
            continue
        name = OPTION_FIELDS[key]
        if getattr(options, name) != getattr(ModelOptions(), name):
            key = key if key in given else RULE_FIELD
            raise UsageError(f"{key} is given in {OPTION_NAME} and with --{name.replace('_', '-')}; give it once")
        changes[name] = _convert(name, value)
    return replace(options, **changes, spec_option=settings or None)  # type: ignore[arg-type]


def _translate_rule(config: dict[str, object]) -> dict[str, object]:
    """Return the entry for our rule. Raises UsageError for an unknown rule, or one that is given twice."""
    from foredraft.verification.registry import find_vllm_rule

    if "verify" in config:
        raise UsageError(f"{RULE_FIELD} and verify are one option of {OPTION_NAME}; give one of them")
    try:
        return {"verify": find_vllm_rule(config[RULE_FIELD]).name}
    except ForedraftError as error:
        raise UsageError(str(error)) from None


def _convert(name: str, value: object) -> object:
    """Return a value of the JSON object as a field of the options holds it."""
    if name in LISTS:
        return value if isinstance(value, list) else [value]
    return str(value) if name in TEXTS else value
