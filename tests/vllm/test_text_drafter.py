"""Drafters without a target in the process: those that read tokens alone, and no others."""

import pytest

from foredraft import zoo
from foredraft.drafters.registry import load_methods
from foredraft.errors import ForedraftError
from foredraft.vllm.text_drafter import TextTarget, create_text_drafter
from tests.support.tiny_models import tokenizer

TARGET = TextTarget(vocab_size=64, context_length=128, tokenizer=tokenizer())
DECLARED = sorted(name for name, method in load_methods().items() if method.reads_tokens_alone)
OTHERS = sorted(load_methods().keys() - set(DECLARED))


@pytest.mark.parametrize("name", DECLARED)
def test_a_method_that_declares_it_reads_tokens_alone(name):
    spec = create_text_drafter({"method": name}, 4, TARGET).spec
    assert spec.max_nodes >= 4
    assert not any((spec.hidden_layers, spec.draft_kv, spec.shares_target_kv, spec.needs_target_argmax))


@pytest.mark.parametrize("name", [name for name in OTHERS if "compose" not in name])
def test_every_other_method_is_refused_in_one_line(name):
    """Seeded fault: a head was made, and read hidden states that vLLM never gives."""
    with pytest.raises(ForedraftError) as caught:
        create_text_drafter({"method": name}, 4, TARGET)
    assert "\n" not in str(caught.value)


def test_an_ensemble_of_such_methods_works_and_one_with_another_does_not():
    assert create_text_drafter({"method": "ngram+suffix+ngram_lm"}, 4, TARGET).spec.max_nodes >= 4
    with pytest.raises(ForedraftError, match="lookahead needs the target's tokens after rejected drafts"):
        create_text_drafter({"method": "lookahead"}, 4, TARGET)
    draft = {"method": "ngram+draft_model", "model": str(zoo.find_folder("draft"))}
    with pytest.raises(ForedraftError, match="needs a KV cache"):
        create_text_drafter(draft, 4, TextTarget(vocab_size=4096, context_length=128))


def test_wrong_options_are_errors():
    with pytest.raises(ForedraftError, match="unknown drafter option 'branchs'"):
        create_text_drafter({"method": "ngram", "branchs": 2}, 4, TARGET)
    with pytest.raises(ForedraftError, match="leave its model out"):
        create_text_drafter({"method": "ngram", "model": "x/y"}, 4, TARGET)
