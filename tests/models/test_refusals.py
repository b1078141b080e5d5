"""Models that the engine cannot serve: refused when they are loaded, by name and with the reason in one line.

Each model of NOT_SEEN and ON_OWN_ATTENTION gave wrong logits through the attention interface, or none.
"""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from foredraft.errors import ForedraftError
from foredraft.models.cache_pass import CachePass
from foredraft.models.compatibility import probe_attention
from foredraft.models.hf import HFModel
from foredraft.models.recomputed_pass import RecomputedPass
from tests.support.families import EXPERTS, TINY, VOCAB, PagedModel, compute_reference, make_family
from tests.support.hybrids import WHOLE_HYBRIDS

HEADS = {"head_dim": 8}

SMALL_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "decoder_ffn_dim": 48,
    "num_decoder_layers": 2,
    "num_decoder_attention_heads": 4,
}

REFUSED = {
    # generate() continues from memories that did not see later tokens, a pass over the whole text sees all
    "xlnet": (
        lambda: hf.XLNetConfig(vocab_size=VOCAB, d_model=32, n_layer=2, n_head=4, initializer_range=0.3),
        "takes no KV cache",
    ),
}
NOT_SEEN = {
    "bert": (lambda: hf.BertConfig(**TINY), "lets tokens attend to later tokens"),
    "dory": (lambda: hf.DoryConfig(**TINY), "gives other logits if a text is divided into passes"),
    "prophetnet": (
        lambda: hf.ProphetNetConfig(**SMALL_DECODER),
        "cannot run on a paged KV cache",
    ),
}
# They have no pages, or states that cannot be rolled back, so they compute whole sequences.
WHOLE = {
    **WHOLE_HYBRIDS,
    "openai-gpt": lambda: hf.OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4),
    "xlm": lambda: hf.XLMConfig(vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4),
}
# They attend in a way that paged attention does not, so they run on their own attention.
ON_OWN_ATTENTION = {
    "mask alone": lambda: hf.PhimoeConfig(**TINY, sliding_window=6, num_local_experts=2, **EXPERTS),
    "dynamic mask": lambda: hf.DogeConfig(**TINY),
    "two calls per layer": lambda: hf.DiffLlamaConfig(**TINY),
    "no keyword arguments": lambda: hf.NemotronConfig(**TINY, head_dim=8),
    "chunks": lambda: hf.Llama4TextConfig(**TINY, **HEADS, num_local_experts=2, intermediate_size_mlp=48),
}


def refusal(model: Any, name: str) -> str:
    with pytest.raises(ForedraftError) as caught:
        HFModel.wrap_model(model, name)
    text = str(caught.value)
    assert text.startswith(f"{name} ({type(model).__name__}) ")
    assert "\n" not in text
    assert text.endswith("; use a model that docs/models.md lists as running, or transformers' generate()")
    return text


@pytest.mark.parametrize("kind", REFUSED | NOT_SEEN)
def test_refused_by_name_with_the_reason(kind: str) -> None:
    config, reason = (REFUSED | NOT_SEEN)[kind]
    torch.manual_seed(0)
    assert reason in refusal(hf.AutoModelForCausalLM.from_config(config()), f"org/tiny-{kind}")


def test_an_encoder_decoder_is_refused() -> None:
    config = hf.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    assert "encoder-decoder" in refusal(hf.T5ForConditionalGeneration(config), "org/tiny-t5")


def test_a_sliding_window_as_wide_as_the_context_hides_nothing() -> None:
    # Phi-3.5-MoE: the window is in the mask alone, but no text is long enough to leave it
    config = hf.PhimoeConfig(**TINY, sliding_window=TINY["max_position_embeddings"], num_local_experts=2, **EXPERTS)
    HFModel.wrap_model(hf.AutoModelForCausalLM.from_config(config), "phimoe")


def test_a_bidirectional_gemma_is_refused() -> None:
    config = hf.Gemma3TextConfig(**TINY, **HEADS, use_bidirectional_attention=True)
    assert "lets tokens attend to later tokens" in refusal(
        hf.AutoModelForCausalLM.from_config(config), "embedding-gemma"
    )


@pytest.mark.parametrize("kind", ON_OWN_ATTENTION)
def test_what_paged_attention_cannot_serve_runs_on_its_own_attention(kind: str) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(ON_OWN_ATTENTION[kind]())
    assert isinstance(HFModel.wrap_model(model, kind).module_pass, CachePass)


@pytest.mark.parametrize("kind", WHOLE)
def test_what_no_cache_of_ours_can_serve_computes_whole_sequences(kind: str) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(WHOLE[kind]())
    assert isinstance(HFModel.wrap_model(model, kind).module_pass, RecomputedPass)


def test_a_model_that_ignores_logits_to_keep_gives_those_of_the_rows_asked_for() -> None:
    class Talkative(hf.LlamaForCausalLM):
        def forward(self, *args: Any, logits_to_keep: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    torch.manual_seed(0)
    model = Talkative(hf.LlamaConfig(**TINY)).eval()
    logits = PagedModel(HFModel.wrap_model(model, "talkative")).read({0: [5, 6, 7], 1: [8, 9]}, rows=[1, 4])
    expected = torch.stack([compute_reference(model, [5, 6])[-1], compute_reference(model, [8, 9])[-1]])
    assert (logits - expected).abs().max() <= 1e-5


def test_kv_memory_is_counted_where_heads_differ_by_layer() -> None:
    config = hf.Gemma4TextConfig(**TINY | {"hidden_size_per_layer_input": 0}, **HEADS, global_head_dim=16)
    lm = HFModel.wrap_model(hf.AutoModelForCausalLM.from_config(config), "gemma4")
    kinds = config.layer_types
    assert "sliding_attention" in kinds
    assert "full_attention" in kinds
    sizes = [2 * 2 * (16 if kind == "full_attention" else 8) for kind in kinds]
    assert lm.bytes_per_token() == 4 * sum(sizes)


def test_a_refused_model_still_runs_as_it_did() -> None:
    model = hf.AutoModelForCausalLM.from_config(hf.BertConfig(**TINY), attn_implementation="eager").eval()
    ids = torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    refusal(model, "bert")
    assert torch.equal(model(input_ids=ids).logits, before)


def test_an_error_without_words_is_a_reason_too() -> None:
    class Silent(hf.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    assert "cannot run on a paged KV cache (NotImplementedError" in refusal(Silent(hf.LlamaConfig(**TINY)), "silent")


def test_the_probe_sees_every_layer_and_leaves_no_trace() -> None:
    lm = make_family("gemma3")[1]
    calls, num_rows = probe_attention(lm.model)
    assert [call.sliding_window for call in calls] == [6, None, 6]
    assert num_rows == 1
    adopted = HFModel.wrap_model(lm.model, "gemma3")
    assert not adopted.pool.layers
    assert all(isinstance(module, nn.Module) and not module.training for module in adopted.model.modules())
