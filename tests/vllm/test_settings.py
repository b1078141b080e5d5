"""The environment variable with the drafter's settings."""

import pytest

from foredraft.errors import ForedraftError
from foredraft.vllm.settings import DEFAULT_SETTINGS, SETTINGS_VARIABLE, read_settings


def test_without_the_variable_suffix_drafts_with_past_outputs():
    assert read_settings({}) == DEFAULT_SETTINGS
    assert read_settings({SETTINGS_VARIABLE: " "})["store_outputs"] > 0


def test_the_variable_holds_the_keys_of_foredrafts_own_configuration():
    assert read_settings({SETTINGS_VARIABLE: '{"method": "ngram", "branches": 1}'}) == {
        "method": "ngram",
        "branches": 1,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('["ngram"]', "takes a JSON object"),
        ('{"method": "ngram", "num_speculative_tokens": 4}', "vLLM's own"),
    ],
)
def test_an_invalid_value_is_one_line_with_the_variable(text, message):
    with pytest.raises(ForedraftError, match=message) as caught:
        read_settings({SETTINGS_VARIABLE: text})
    assert SETTINGS_VARIABLE in str(caught.value)
    assert "\n" not in str(caught.value)
