"""Facts of configurations: the limit of the context."""

import pytest
import transformers as hf

from foredraft.models.model_facts import MAX_CONTEXT, _find_context_limit


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (hf.XLNetConfig(), MAX_CONTEXT),
        (hf.RwkvConfig(), 1024),
        (hf.LlamaConfig(max_position_embeddings=300), 300),
        (hf.GPT2Config(n_positions=200), 200),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_the_context_of_a_configuration(config: hf.PreTrainedConfig, limit: int) -> None:
    """Fault: XLNet says -1 for no limit, and every prompt was too long for it."""
    assert _find_context_limit(config) == limit
