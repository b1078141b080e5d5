"""Every model family by name: small random models whose weights are large enough that attention patterns matter."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from foredraft.kv.pool import compact_accepted, plan_moves
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import HFModel
from foredraft.tree import TokenTree

VOCAB = 97
SLIDING = 6
PAGE_SIZE = 4
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def _make_tiny_config(config: Callable[..., Any], without: Sequence[str] = (), **more: Any) -> Callable[[], Any]:
    return lambda: config(**{key: value for key, value in TINY.items() if key not in without} | more)


GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": VOCAB,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _make_tiny_config(hf.LlamaConfig),
    "llama-tied": _make_tiny_config(hf.LlamaConfig, tie_word_embeddings=True, attention_bias=True),
    "llama-rope-scaled": _make_tiny_config(
        hf.LlamaConfig,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32
        },
    ),
    "mistral": _make_tiny_config(hf.MistralConfig, sliding_window=SLIDING),
    "qwen2": _make_tiny_config(hf.Qwen2Config),
    "qwen2-sliding": _make_tiny_config(
        hf.Qwen2Config, use_sliding_window=True, sliding_window=SLIDING, max_window_layers=1
    ),
    "qwen3": _make_tiny_config(hf.Qwen3Config, head_dim=16),
    "qwen3_moe": _make_tiny_config(hf.Qwen3MoeConfig, head_dim=16, moe_intermediate_size=24, num_experts=4, **EXPERTS),
    "mixtral": _make_tiny_config(hf.MixtralConfig, num_local_experts=4, sliding_window=SLIDING, **EXPERTS),
    "gemma2": _make_tiny_config(
        hf.Gemma2Config,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=SLIDING,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "gemma3": _make_tiny_config(
        hf.Gemma3TextConfig,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=SLIDING,
        layer_types=ALTERNATING,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    ),
    "phi3": _make_tiny_config(hf.Phi3Config, sliding_window=SLIDING),
    "phi3-longrope": _make_tiny_config(
        hf.Phi3Config,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 5.0, 9.0],
            "original_max_position_embeddings": 64,
            "factor": 4.0,
        },
    ),
    "olmo2": _make_tiny_config(hf.Olmo2Config),
    "gpt2": lambda: hf.GPT2Config(**GPT2),
    "gpt2-scaled": lambda: hf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": _make_tiny_config(hf.GPTNeoXConfig, without=["num_key_value_heads"], rotary_pct=0.5),
    "gpt_neox-serial": _make_tiny_config(
        hf.GPTNeoXConfig, without=["num_key_value_heads"], use_parallel_residual=False
    ),
    "starcoder2": _make_tiny_config(hf.Starcoder2Config, sliding_window=SLIDING),
    "cohere": _make_tiny_config(hf.CohereConfig, logit_scale=0.25, use_qk_norm=True),
    "gpt_oss": _make_tiny_config(
        hf.GptOssConfig, head_dim=8, num_local_experts=4, sliding_window=SLIDING, layer_types=ALTERNATING, **EXPERTS
    ),
}  # fmt: skip


@cache
def make_family(family: str, dtype: torch.dtype = torch.float32) -> tuple[Any, HFModel]:
    """Make the family's model for transformers, and its copy for this package."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager").eval().to(dtype)
    for name, weight in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(weight, 0, 2)
    if dtype == torch.float64:
        model.set_attn_implementation(EXACT)
    return model, HFModel.wrap_model(copy.deepcopy(model), family)


@torch.no_grad()
def compute_reference(model: Any, ids: Sequence[int]) -> Tensor:
    """[len(ids), V] logits of transformers' own forward pass."""
    return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]


def list_path(parents: Sequence[int], node: int) -> list[int]:
    """List the nodes of a tree from its root to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


@dataclass
class PagedModel:
    """A model on scattered pages: requests by number, each with a block table in no order at all."""

    lm: HFModel
    held: dict[int, int] = field(default_factory=dict)  # request -> tokens whose KV is written
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lm.pool.clear()
        self._shuffled = (torch.randperm(150, generator=torch.Generator().manual_seed(7)) + 1).tolist()

    def get_table(self, request: int) -> list[int]:
        if request not in self.tables:
            self.tables[request] = [self._shuffled.pop() for _ in range(30)]
        return self.tables[request]

    @torch.inference_mode()
    def read(
        self,
        chunks: dict[int, Sequence[int]],
        rows: Sequence[int] | None = None,
        hidden_layers: tuple[int, ...] = (),
        is_settled: bool = False,
        reads_all_states: bool = True,
    ) -> Any:
        """Run one pass over a run of tokens for every request; returns all rows' logits unless some are named.

        A settled run is a prompt chunk: a recurrent layer keeps few states of it.
        """
        spans = []
        for request, chunk in chunks.items():
            num_settled = len(chunk) - 1 if is_settled else 0
            start, size = self.held.get(request, 0), len(chunk)
            spans.append(Span(self.get_table(request), start, list(chunk), range(size), num_settled=num_settled))
            self.held[request] = self.held.get(request, 0) + len(chunk)
        wanted = range(sum(len(span.tokens) for span in spans)) if rows is None else rows
        batch = ForwardBatch(tuple(spans), list(wanted), PAGE_SIZE, "cpu", reads_all_states=reads_all_states)
        logits, features = self.lm.forward(batch, hidden_layers)
        self.lm.pool.check_null_page(PAGE_SIZE)
        return (logits, features) if hidden_layers else logits

    @torch.inference_mode()
    def verify(self, tree: TokenTree) -> Tensor:
        """Logits after every node of a tree for requests 0, 1, ..."""
        starts, tables = (
            [self.held[b] for b in range(len(tree.sizes))],
            [self.get_table(b) for b in range(len(tree.sizes))],
        )
        logits, _ = self.lm.forward(ForwardBatch.from_token_tree(tree, starts, tables, PAGE_SIZE, "cpu"))
        return logits

    @torch.inference_mode()
    def compact(self, paths: list[list[int]]) -> int:
        """Compact the paths of requests 0, 1, ...; returns how many entries had to move."""
        starts, tables = [self.held[b] for b in range(len(paths))], [self.get_table(b) for b in range(len(paths))]
        compact_accepted(self.lm.pool, paths, starts, tables, PAGE_SIZE, torch.device("cpu"))
        for b, path in enumerate(paths):
            self.held[b] += len(path)
        return len(plan_moves(paths, starts, tables, PAGE_SIZE)[0])


EXACT = "eager_without_float32"


def attend_exactly(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **unused: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' eager attention, but the softmax stays in float64; theirs goes through float32."""
    groups = query.shape[1] // key.shape[1]
    scores = (
        query
        @ key.repeat_interleave(groups, 1).transpose(2, 3)
        * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    )
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    assert attention_mask is not None
    scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register(EXACT, attend_exactly)
AttentionMaskInterface.register(EXACT, eager_mask)
