"""The part of vLLM's V1 runner that a `custom_class` drafter sees: rows of token ids that move between calls."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

CONTEXT = 256
VOCAB = 50


def make_config(num_tokens: int = 4, **model: Any) -> SimpleNamespace:
    """Make a configuration with the attributes of vLLM's that the proposer reads."""
    config = {
        "max_model_len": CONTEXT,
        "tokenizer": "/nowhere",
        "tokenizer_revision": None,
        "skip_tokenizer_init": True,
        "get_vocab_size": lambda: VOCAB,
        "try_get_generation_config": lambda: {"eos_token_id": [0]},
        "hf_config": SimpleNamespace(to_dict=lambda: {"eos_token_id": 1}),
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        model_config=SimpleNamespace(**config | model),
    )


def continue_text(tokens: list[int]) -> int:
    """Return the next token of the target: greedy, and periodic for a while, so that copies are accepted."""
    return 2 + (3 * tokens[-1] + len(tokens) // 40) % 7


@dataclass
class FakeSequence:
    """One request."""

    prompt: list[int]
    tokens: list[int]
    draft: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)


@dataclass
class FakeVllm:
    """Runs requests with a proposer. Rows are shuffled in every step, and requests sit out some steps."""

    proposer: Any
    seed: int = 0
    absence: float = 0.0  # share of the steps that a request sits out
    target: Callable[[list[int]], int] = continue_text
    num_drafts: int = 0
    num_accepted: int = 0
    num_steps: int = 0

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Return the outputs of all prompts."""
        rng = random.Random(self.seed)
        sequences = [FakeSequence(prompt, list(prompt)) for prompt in prompts]
        while running := [s for s in sequences if len(s.tokens) < len(s.prompt) + num_tokens]:
            batch = [s for s in running if rng.random() >= self.absence]
            rng.shuffle(batch)
            if batch:
                self.step(batch)
        return [s.tokens[len(s.prompt) :][:num_tokens] for s in sequences]

    def step(self, batch: list[FakeSequence]) -> None:
        """Verify the drafts of a batch, and let the proposer draft again."""
        self.num_steps += 1
        for sequence in batch:
            self.verify(sequence)
        rows = np.full((len(batch) + 2, CONTEXT), -1, dtype=np.int32)  # a persistent batch has more rows than requests
        counts = np.zeros(len(batch) + 2, dtype=np.int32)
        for index, sequence in enumerate(batch):
            rows[index, : len(sequence.tokens)] = sequence.tokens
            counts[index] = len(sequence.tokens)
        drafts = self.proposer.propose([s.sampled for s in batch], counts, rows, slot_mappings=None)
        assert len(drafts) == len(batch)
        for sequence, draft in zip(batch, drafts, strict=True):
            sequence.draft = list(draft)

    def verify(self, sequence: FakeSequence) -> None:
        """Commit the accepted part of a draft, and the target's own token after it."""
        accepted = []
        for token in sequence.draft:
            if token != self.target([*sequence.tokens, *accepted]):
                break
            accepted.append(token)
        self.num_drafts += bool(sequence.draft)
        self.num_accepted += len(accepted)
        sequence.sampled = [*accepted, self.target([*sequence.tokens, *accepted])]
        sequence.tokens += sequence.sampled
