"""Many samples of one prompt, and what the checks of the distribution read from them.

The sampling keeps the three likeliest tokens, so that all outcomes of the first tokens can be enumerated.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from foredraft.certify.draft_tree import DraftTree
from foredraft.certify.recorder import StepRecord, StepRecorder
from foredraft.certify.reference import ReferenceHistory, compute_reference
from foredraft.certify.statistics import ChiSquare, compare_counts
from foredraft.certify.step_distribution import integrate_trees
from foredraft.certify.subject import EncodedPrompt, Subject
from foredraft.sampling.params import Sampling
from foredraft.verification.probs import Probs
from foredraft.verification.rule import Rule

Tokens = tuple[int, ...]
NUM_TOKENS = 3  # tokens of each sample
SAMPLING = Sampling(temperature=2.0, top_k=3, max_tokens=NUM_TOKENS + 1, ignore_eos=True)
BATCH = 256  # requests that are submitted together
NUM_POINTS = 1 << 15  # points of an integration, whose error is then below 6e-4
MIN_SHARE = 0.08  # share of the samples of a prompt that a group of steps needs
MIN_MASS = 0.9995  # probability of the draft trees that must have occurred
MAX_MASS = 1 + 1e-6
MAX_GROUPS = 4  # groups of steps of a prompt, the largest first


@dataclass(frozen=True)
class StepGroup:
    """Steps after one output of one prompt whose drafts are samples of one experiment."""

    records: tuple[StepRecord, ...]

    @cached_property
    def trees(self) -> list[DraftTree]:
        """Different draft trees."""
        return list({id(record.tree): record.tree for record in self.records}.values())

    @cached_property
    def probability(self) -> float:
        """Sum of the probabilities of the trees; 1 if all possible ones occurred."""
        return sum(tree.probability for tree in self.trees)

    @cached_property
    def probs(self) -> Mapping[Tokens, Probs]:
        """Target probabilities p after every path of draft tokens."""
        result: dict[Tokens, Probs] = {}
        for record in self.records:
            for node, probs in enumerate(record.probs):
                result.setdefault(record.tree.collect_path(node), probs)
        return result

    @property
    def is_complete(self) -> bool:
        """Whether the trees are nearly all outcomes of one experiment."""
        return MIN_MASS <= self.probability <= MAX_MASS

    def split(self) -> "list[StepGroup]":
        """Split trees that cannot be outcomes of one experiment by their size.

        A drafter that decides the length of a draft by measured times makes several experiments after the same tokens.
        Parts that are not complete are left out: there the length may depend on the samples.
        """
        if self.probability <= MAX_MASS:
            return [self]
        by_size: dict[int, list[StepRecord]] = defaultdict(list)
        for record in self.records:
            by_size[record.num_drafted].append(record)
        parts = [StepGroup(tuple(records)) for records in by_size.values()]
        return [part for part in parts if part.is_complete]

    def compare_drafts(self) -> ChiSquare:
        """Test the counts of the trees against their probabilities."""
        counts = Counter(id(record.tree) for record in self.records)
        unseen = max(1 - self.probability, 0.0)
        return compare_counts(
            [*(counts[id(tree)] for tree in self.trees), 0], [*(tree.probability for tree in self.trees), unseen]
        )

    def measure_bias(self, rule: Rule) -> tuple[float, float]:
        """Return (bias, probability of impossible tokens) of the steps of this group."""
        return integrate_trees(rule.verify, self.trees, self.probs, NUM_POINTS)


@dataclass(frozen=True)
class PromptSamples:
    """Many samples of one prompt, with the steps that produced them."""

    prompt: EncodedPrompt
    prompt_ids: Tokens
    outputs: tuple[Tokens, ...]  # one per sample, NUM_TOKENS each
    records: tuple[StepRecord, ...]

    @classmethod
    def generate(cls, subject: Subject, index: int, rule: Rule, num_samples: int, num_nodes: int) -> "PromptSamples":
        """Sample one prompt with a rule; sample i has seed i."""
        recorder = StepRecorder(rule)
        prompt, outputs = subject.prompts[index], []
        prompt_ids: Tokens = ()
        for start in range(0, num_samples, BATCH):
            seeds = range(start, min(start + BATCH, num_samples))
            samplings = [replace(SAMPLING, seed=seed) for seed in seeds]
            for completion in subject.draft([prompt] * len(seeds), samplings, num_nodes, recorder.as_rule()):
                outputs.append(tuple(completion.token_ids[:NUM_TOKENS]))
                prompt_ids = tuple(completion.prompt_token_ids)
        return cls(prompt, prompt_ids, tuple(outputs), tuple(recorder.records))

    @cached_property
    def groups(self) -> list[StepGroup]:
        """Groups of drafting steps, the largest first."""
        found: dict[object, list[StepRecord]] = defaultdict(list)
        for record in self.records:
            if record.num_drafted:
                found[record.prefix, record.tree.group_key].append(record)
        parts = [part for group in found.values() for part in StepGroup(tuple(group)).split()]
        large = [part for part in parts if len(part.records) >= MIN_SHARE * len(self.outputs)]
        large.sort(key=lambda part: len(part.records), reverse=True)
        return large[:MAX_GROUPS]

    def compare_outputs(self, subject: Subject) -> ChiSquare:
        """Test the joint counts of the first tokens against the probabilities of plain decoding."""
        joint = self._enumerate(subject)
        counts = Counter(self.outputs)
        cells = [*joint, *(tokens for tokens in counts if tokens not in joint)]
        return compare_counts([counts[tokens] for tokens in cells], [joint.get(tokens, 0.0) for tokens in cells])

    def measure_rounding(self, subject: Subject) -> float:
        """Return the largest total variation distance between p of drafting steps and of plain decoding."""
        distances = [0.0]
        for prefix, probs in self._recorded.items():
            plain = self._compute_plain(subject, prefix)
            distances.append(float(np.abs(probs.gather(None) / probs.total - plain.gather(None)).sum() / 2))
        return max(distances)

    @cached_property
    def _recorded(self) -> Mapping[Tokens, Probs]:
        """Distributions p of the engine after outputs and draft paths of at most NUM_TOKENS - 1 tokens."""
        result: dict[Tokens, Probs] = {}
        for record in self.records:
            for node, probs in enumerate(record.probs):
                tokens = (*record.prefix, *record.tree.collect_path(node))
                if len(tokens) < NUM_TOKENS and probs.total > 0:
                    result.setdefault(tokens, probs)
        return result

    def _enumerate(self, subject: Subject) -> dict[Tokens, float]:
        """Return the probability of every output of NUM_TOKENS tokens."""
        joint: dict[Tokens, float] = {(): 1.0}
        for _ in range(NUM_TOKENS):
            joint = {
                (*tokens, token): mass * step
                for tokens, mass in joint.items()
                for token, step in self._list_next(subject, tokens)
            }
        return joint

    def _list_next(self, subject: Subject, tokens: Tokens) -> list[tuple[int, float]]:
        probs = self._recorded.get(tokens) or self._compute_plain(subject, tokens)
        ids = np.flatnonzero(probs.mass) if probs.ids is None else probs.ids
        return [(int(token), probs[int(token)] / probs.total) for token in ids if probs[int(token)] > 0]

    def _compute_plain(self, subject: Subject, tokens: Tokens) -> Probs:
        """Compute p after output tokens by plain decoding and the slow reference."""
        logits = subject.read_logits(self.prompt, tokens)
        row = compute_reference(logits, SAMPLING, ReferenceHistory(self.prompt_ids, tokens, frozenset()))
        ids = np.flatnonzero(row.p)
        return Probs(row.p[ids], len(row.p), ids)
