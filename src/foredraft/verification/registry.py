"""Registry of the verification rules, and the one place where the name of a rule becomes a `Rule`."""

from collections.abc import Mapping
from typing import Any

from foredraft.errors import ForedraftError
from foredraft.verification.rule import Rule
from foredraft.verification.rules import BLOCK, MATCH, REJECT, TYPICAL
from foredraft.verification.spectr import SPECTR

RULES = {rule.name: rule for rule in (MATCH, REJECT, BLOCK, SPECTR, TYPICAL)}
AUTO = "auto"  # option: the rule of a request follows from its sampling parameters
VERIFY_OPTIONS = (AUTO, *RULES)


def find_rule(verify: str | Rule, settings: Mapping[str, float] | None = None) -> Rule | None:
    """Return the rule of the option `verify`; None = "auto", chosen for every request.

    Args:
        verify: a name, or a rule as it is.
        settings: values of settings of the rule. Default None = its own.

    Raises:
        ForedraftError: there is no such rule; or the rule has no such setting, or a value is out of range. A message
            about a setting begins with its name.
    """
    if not isinstance(verify, Rule) and verify not in VERIFY_OPTIONS:
        raise ForedraftError(f"unknown verification rule {verify!r:.80}; use one of {', '.join(VERIFY_OPTIONS)}")
    rule = verify if isinstance(verify, Rule) else RULES.get(verify)
    for name in settings or ():
        if rule is None or name not in rule.settings:
            owners = ", ".join(other.name for other in RULES.values() if name in other.settings)
            given = AUTO if rule is None else rule.name
            raise ForedraftError(f"{name} is a setting of the rule {owners}, not of {given}; choose that rule too")
    return rule if rule is None else rule.with_settings(settings or {})


def find_vllm_rule(value: Any) -> Rule:
    """Return the rule of a value of vLLM's field rejection_sample_method. Raises ForedraftError if there is none."""
    rules = {rule.vllm_name: rule for rule in RULES.values() if rule.vllm_name}
    if value in rules:
        return rules[value]
    hint = "; --spec-simulate RATE simulates acceptance, which changes the output" if value == "synthetic" else ""
    raise ForedraftError(
        f"rejection_sample_method takes {' or '.join(rules)}, got {value!r:.80}{hint}; verify names every rule"
    )
