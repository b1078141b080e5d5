"""Tiny Gemma-4 targets and assistants of transformers' classes in float64, and assistants fitted to the tiny Llama."""

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from torch.nn import functional as F

from foredraft import LLM
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.creation import create_drafter
from foredraft.drafters.gemma4_assistant.method import METHOD
from foredraft.drafters.gemma4_assistant.network import AssistantNetwork
from foredraft.drafters.gemma4_assistant.shape import AssistantRope, AssistantShape
from foredraft.drafters.interface import Drafter
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch, Span
from foredraft.request import Batch
from foredraft.tree import TokenTree
from tests.support import tiny_heads, tiny_models
from tests.support.fit_cache import fit_once

WINDOW, CENTROIDS = 12, 8
ORDERED = {"use_ordered_embeddings": True, "num_centroids": CENTROIDS, "centroid_intermediate_top_k": 3}
SLIDING, FULL = "sliding_attention", "full_attention"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32}
VOCAB = 96  # a multiple of the number of clusters


def make_text_config(kinds: list[str], num_shared: int, hidden: int, **settings: Any) -> hf.Gemma4TextConfig:
    """Make a configuration of a decoder with layers of these kinds, the last `num_shared` of which share keys."""
    return hf.Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=len(kinds),
        layer_types=kinds, num_kv_shared_layers=num_shared, sliding_window=WINDOW, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0, max_position_embeddings=tiny_models.CONTEXT, initializer_range=0.3,
        eos_token_id=3, bos_token_id=None, pad_token_id=None, **HEADS | settings,
    )  # fmt: skip


@cache
def make_target(num_shared: int = 2) -> Any:
    """Make a target with two layers of each kind, the last `num_shared` of which have no keys of their own."""
    torch.manual_seed(0)
    kinds = [SLIDING, FULL] * 2 if num_shared in (0, 2) else [SLIDING, FULL, SLIDING, SLIDING, FULL]
    config = make_text_config(kinds, num_shared, 32, final_logit_softcapping=30.0, tie_word_embeddings=False)
    model = hf.Gemma4ForCausalLM(config)
    return model.double().eval()


def make_whole_target(kind: str) -> Any:
    """Make a target of the classes that folders of Gemma 4 hold, with layers for the same assistants."""
    torch.manual_seed(0)
    settings = make_text_config([SLIDING, FULL] * 2, 0, 32, tie_word_embeddings=False).to_dict()
    settings["pad_token_id"] = 0
    if kind == "gemma4":
        config: Any = hf.Gemma4Config(text_config=settings)
        return hf.Gemma4ForConditionalGeneration(config).double().eval()
    settings |= {"model_type": "gemma4_unified_text"}
    for name in ("attention_k_eq_v", "hidden_size_per_layer_input", "vocab_size_per_layer_input"):
        settings.pop(name)
    if kind == "gemma4_unified_text":
        return hf.Gemma4UnifiedForCausalLM(hf.Gemma4UnifiedTextConfig(**settings)).double().eval()
    config = hf.Gemma4UnifiedConfig(text_config=settings)
    return hf.Gemma4UnifiedForConditionalGeneration(config).double().eval()


def copy_with_sdpa(model: Any) -> Any:
    """Copy a target with transformers' own attention."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("sdpa")
    return copied


@cache
def make_llm(num_shared: int = 2) -> LLM:
    return LLM(make_target(num_shared), None, is_debug=True)


@cache
def make_assistant(is_ordered: bool = False, seed: int = 1) -> Any:
    """Make an assistant of three layers for these targets."""
    torch.manual_seed(seed)
    text = make_text_config([SLIDING, SLIDING, FULL], 3, 24)
    extra = ORDERED if is_ordered else {}
    config = hf.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32, **extra)
    model = hf.Gemma4AssistantForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or "scalar" in name:
                tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
        if is_ordered:
            model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model


def save_assistant(folder: Path, is_ordered: bool = False) -> Path:
    """Write the folder of an assistant as transformers does."""
    make_assistant(is_ordered).save_pretrained(folder)
    return folder


def make_drafter(folder: Path, llm: LLM, num_tokens: int, **options: Any) -> Any:
    """Make the drafter of a folder for a target."""
    target = llm.target
    context = DrafterContext(
        target.vocab_size, target, num_tokens, str(folder), dtype=target.model.dtype, device=target.device
    )
    return create_drafter(METHOD, METHOD.config(**options), context)


@dataclass
class Proposal:
    """Tree of one request."""

    text: list[int]
    tokens: list[int]
    parents: list[int]
    q: Tensor | None  # [1 + nodes, V]


class ProposalRecorder(DrafterWrapper):
    """Drafter that notes every draft."""

    def __init__(self, drafter: Any) -> None:
        super().__init__(drafter)
        self.found: list[Proposal] = []

    def propose(self, batch: Batch) -> TokenTree:
        tree = super().propose(batch)
        for b, request in enumerate(batch.requests):
            if len(tree.tokens[b]) > 1:
                rows = [tree.get_row(b, node) for node in range(len(tree.tokens[b]))]
                q = None if tree.q is None else tree.q[rows]
                text = list(request.get_tokens(0, request.num_tokens))
                self.found.append(Proposal(text, tree.tokens[b][1:], tree.parents[b][1:], q))
        return tree


# Fitted assistants for the Llama of `tiny_models`, whose layers all have full attention.

STEPS, RATE, PAGE_SIZE = 60, 2e-2, 16


@dataclass(frozen=True)
class TargetTexts:
    """Texts of a target: n sequences of L tokens, with what an assistant reads."""

    tokens: Tensor  # [n, L]
    states: Tensor  # [n, L, B]
    keys: Tensor  # [n, L, Hkv, D] of the last layer
    values: Tensor  # [n, L, Hkv, D]

    @classmethod
    def from_target(cls, llm: LLM) -> "TargetTexts":
        tokens = tiny_heads.generate_texts(llm)[0]
        n, length = tokens.shape
        per_text = -(-length // PAGE_SIZE)
        spans = [
            Span(range(1 + per_text * i, 1 + per_text * (i + 1)), 0, text, range(length))
            for i, text in enumerate(tokens.tolist())
        ]
        lm = llm.target.with_new_kv()
        with torch.no_grad():
            batch = ForwardBatch.from_spans(spans, PAGE_SIZE, llm.target.device)
            states = lm.forward(batch, (AFTER_FINAL_NORM,))[1]
        assert states is not None
        stored = [x[batch.write_slots] for x in lm.pool.layers[llm.target.num_layers - 1]]
        return cls(tokens, states.view(n, length, -1), *(x.view(n, length, *x.shape[1:]) for x in stored))

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Attend from the rows after tokens 1 to L - 1 of all texts: the row at t sees the keys before t."""
        n, length = self.tokens.shape
        q = query.view(n, length - 1, *query.shape[1:]).transpose(1, 2)
        k, v = self.keys[:, :-1].transpose(1, 2), self.values[:, :-1].transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(0, 1)


def make_shape(llm: LLM, is_ordered: bool = False) -> AssistantShape:
    """Make the shape of an assistant for a target whose layers all have full attention."""
    config = llm.target.model.config
    heads, width = config.num_attention_heads, config.hidden_size
    return AssistantShape(
        hidden=width, target_hidden=width, vocab_size=llm.target.vocab_size, intermediate=2 * width, heads=heads,
        layer_kinds=(FULL, FULL), head_dims=(width // heads,) * 2, ropes={FULL: AssistantRope(1e4)},
        num_centroids=llm.target.vocab_size if is_ordered else 0, num_selected=40 if is_ordered else 0,
    )  # fmt: skip


def fit_assistant(llm: LLM) -> dict[str, Tensor]:
    """Teach an assistant the texts of a target by heart, in part, over two draft tokens."""
    texts = TargetTexts.from_target(llm)
    torch.manual_seed(0)
    network = AssistantNetwork(make_shape(llm)).to(texts.states.dtype)
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    embedding = llm.target.embedding
    n, length = texts.tokens.shape
    positions = torch.arange(1, length).repeat(n)
    for _ in range(STEPS):
        states, loss = texts.states[:, :-1].flatten(0, 1), torch.zeros(())
        for depth in range(2):
            read = texts.tokens[:, 1:].roll(-depth, 1).flatten()
            hidden = network(embedding[read], states, positions, texts.attend)
            states = network.post_projection(hidden)
            logits = network.compute_logits(hidden).view(n, length - 1, -1)[:, : length - 2 - depth]
            loss = loss + F.cross_entropy(logits.flatten(0, 1), texts.tokens[:, 2 + depth :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return dict(network.state_dict())


@dataclass(frozen=True)
class AssistantCase:
    """How the drafter of a fitted assistant is made."""

    method: Method
    is_ordered: bool = False

    def get_checkpoint(self, llm: LLM) -> Checkpoint:
        target = llm.target
        inputs = {"embedding": target.embedding, "head": target.head_weight}
        key = f"{self.method.name} {target.num_parameters} {target.num_layers}"
        tensors = fit_once(key, inputs, lambda: fit_assistant(llm))
        if self.is_ordered:  # clusters of one token, whose centroids are the rows of the output matrix
            ordering = torch.randperm(target.vocab_size, generator=torch.Generator().manual_seed(0))
            tensors |= {
                "masked_embedding.token_ordering": ordering,
                "masked_embedding.centroids.weight": tensors["lm_head.weight"][ordering],
            }
        return Checkpoint(self.method.name, "fitted", "a fitted assistant", make_shape(llm, self.is_ordered), tensors)

    def make_drafter(self, num_tokens: int, llm: LLM | None = None, **options: Any) -> Drafter:
        """Beside a target, the tiny one in float64 if none is given."""
        llm = llm or tiny_models.plain()
        target = llm.target
        context = DrafterContext(target.vocab_size, target, num_tokens, dtype=target.model.dtype, device=target.device)
        fitted = llm if target.device.type == "cpu" else tiny_models.plain()
        assert self.method.from_checkpoint is not None
        return self.method.from_checkpoint(self.method.config(**options), self.get_checkpoint(fitted), context)
