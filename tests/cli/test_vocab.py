"""--spec-vocab: its values, where they are used, and the methods that refuse it."""

import pytest

from foredraft.cli.backend import CliChoices, build_drafter_spec
from foredraft.cli.options import ModelOptions
from foredraft.cli.shell import UsageError

WORDS, TAKES = ("auto", "slem", "tli"), frozenset({"draft_model"})
CHOICES = CliChoices(("draft_model", "ngram"), {}, ("auto",), vocab_modes=WORDS, cross_vocab_methods=TAKES)


def test_an_unknown_word_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(UsageError, match="unknown --spec-vocab 'both'; use one of: auto, slem, tli"):
        CHOICES.check(ModelOptions(spec_vocab="both"))
    CHOICES.check(ModelOptions(spec_vocab="slem"))
    CHOICES.check(ModelOptions(spec_vocab="tli", spec_method=["draft_model"]))


@pytest.mark.parametrize("method", ["ngram", "none"])
def test_a_method_without_a_draft_model_is_refused_with_what_to_do(method: str) -> None:
    with pytest.raises(UsageError, match=f"--spec-method {method} has none; leave it out, or use --spec-method draft"):
        CHOICES.check(ModelOptions(spec_vocab="tli", spec_method=[method]))


def test_it_becomes_an_option_of_the_method_that_takes_it() -> None:
    options = ModelOptions(spec_vocab="tli", spec_model=["small"])
    assert build_drafter_spec(options, "draft_model") == {"method": "draft_model", "model": "small", "vocab": "tli"}
    with pytest.raises(UsageError, match="--spec-method ngram has none"):
        build_drafter_spec(options, "ngram")
