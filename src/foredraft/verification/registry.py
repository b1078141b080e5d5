"""Registry of the verification rules, and the one place where the name of a rule becomes a `Rule`."""

from foredraft.errors import ForedraftError
from foredraft.verification.rule import Rule
from foredraft.verification.rules import BLOCK, MATCH, REJECT, TYPICAL

RULES = {rule.name: rule for rule in (MATCH, REJECT, BLOCK, TYPICAL)}
AUTO = "auto"  # option: the rule of a request follows from its sampling parameters
VERIFY_OPTIONS = (AUTO, *RULES)


def find_rule(verify: str | Rule) -> Rule | None:
    """Return the rule of the option `verify`: a name, or a rule as it is. None = "auto", chosen for every request.

    Raises:
        ForedraftError: there is no such rule.
    """
    if isinstance(verify, Rule):
        return verify
    if verify not in VERIFY_OPTIONS:
        raise ForedraftError(f"unknown verification rule {verify!r}; use one of {', '.join(VERIFY_OPTIONS)}")
    return RULES.get(verify)
