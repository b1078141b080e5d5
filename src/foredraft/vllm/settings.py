"""Settings of the drafter inside vLLM.

vLLM's speculative_config has a fixed list of fields, so the drafter's own come in an environment variable.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from foredraft.errors import ForedraftError

SETTINGS_VARIABLE = "FOREDRAFT_SPECULATIVE_CONFIG"
DEFAULT_SETTINGS: dict[str, Any] = {"method": "suffix", "store_outputs": 1000}


def read_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the drafter in the keys of Foredraft's speculative_config; suffix with past outputs by default.

    Raises:
        ForedraftError: the variable holds no JSON object, or a length of drafts.
    """
    text = environment.get(SETTINGS_VARIABLE, "").strip()
    if not text:
        return dict(DEFAULT_SETTINGS)
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ForedraftError(f"{SETTINGS_VARIABLE} is not JSON ({error.msg}: character {error.pos})") from None
    if not isinstance(settings, dict):
        raise ForedraftError(f'{SETTINGS_VARIABLE} takes a JSON object such as {{"method": "suffix"}}, got {text!r}')
    if "num_speculative_tokens" in settings:
        raise ForedraftError(
            f"{SETTINGS_VARIABLE} holds num_speculative_tokens; give it in vLLM's own --speculative-config"
        )
    return settings
