"""Random steps to verify on the GPU and on the CPU: trees, logits, noise, rules and sampling parameters of a batch.

On a machine without a GPU the kernels run in triton's interpreter.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from foredraft.kernels.gpu.loading import load_kernels
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit, SampledSiblings, TokenTree
from foredraft.verification.device import find_device_requests
from foredraft.verification.noise import SeededNoise
from foredraft.verification.probs import LazyTargetProbs
from foredraft.verification.rule import Rule
from foredraft.verification.rules import BLOCK, MATCH, REJECT, combine_rules
from foredraft.verification.step import verify_step
from tests.support.gpu_cases import DEVICE

BATCH = (MATCH, REJECT, BLOCK, REJECT, BLOCK, MATCH, REJECT, BLOCK)
OUTCOMES = ("failed", "accepted", "deep", "rejected", "invalid after a draft")  # that each of its rules must show
SAMPLINGS = (
    Sampling(temperature=0),
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1e-4),
    Sampling(top_k=1),
    Sampling(top_k=4, temperature=2.0),
    Sampling(top_k=10_000),
    Sampling(top_p=0.8),
    Sampling(top_p=1e-7),
    Sampling(top_p=0.97, temperature=3.0),
    Sampling(min_p=0.1),
    Sampling(min_p=1.0),
    Sampling(temperature=1.3, top_k=24, top_p=0.9, min_p=0.02),
)
CHAINS = ((-1,), (-1, 0), (-1, 0, 1, 2), (-1, 0, 1, 2, 3))
TREES = ((-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2), (-1, 0, 0, 0, 2, 2, 4), (-1, 0, 0, 1, 1, 3, 3, 3))
LOGITS = ("plain", "peaked", "flat", "ties", "masked", "wide", "broken")
DRAFTS = ("equal", "near", "near", "far", "none", "broken")
SEEDS = (0, 7, -3, (1 << 63) + 5, (1 << 64) - 1)


@dataclass(frozen=True)
class WalkCase:
    """A step: request b has rules[b] and samplings[b]."""

    logits: Tensor  # [R, V]
    tree: TokenTree
    noise: SeededNoise
    rules: Sequence[Rule]
    samplings: Sequence[Sampling]

    def make_probs(self, device: str) -> LazyTargetProbs:
        rows = zip(self.samplings, self.tree.roots, self.tree.sizes, strict=True)
        return LazyTargetProbs(
            self.logits.to(device), [sampling for sampling, root, size in rows for _ in range(root, size)]
        )

    def run(self, tile: int = 64, shortlist: int = 24, max_scratch: int = 1 << 28) -> Commit:
        """Verify on the device, with programs so small that rows have several tiles."""
        from foredraft.kernels.gpu.verify import WalkPlan, walk_trees

        plan = WalkPlan(tile, shortlist, num_warps=4, max_scratch=max_scratch)
        kernels = replace(load_kernels(), walk_trees=partial(walk_trees, plan=plan))
        return verify_step(self.tree, self.make_probs(DEVICE), self.noise, self.rules, kernels)

    def reference(self) -> Commit:
        """Verify by the rules on the CPU."""
        return combine_rules(self.rules)(self.tree, self.make_probs("cpu"), self.noise)

    def list_on_device(self) -> list[int]:
        return find_device_requests(self.tree, self.make_probs("cpu"), self.rules)

    def describe(self, b: int) -> str:
        return f"request {b}: {self.rules[b].name}, {self.samplings[b].filter_settings}, {self.tree.parents[b]}"


@dataclass(frozen=True)
class CaseKinds:
    """Kinds from which a random case chooses for every request."""

    shapes: Sequence[tuple[int, ...]] = TREES  # besides chains of draft tokens
    samplings: Sequence[Sampling] = SAMPLINGS
    logits: Sequence[str] = LOGITS
    drafts: Sequence[str] = DRAFTS


ALL_KINDS = CaseKinds()
# Children of a node that are rejected one after the other.
SIBLINGS = CaseKinds(((-1, 0, 0, 0, 0, 0),) * 20, SAMPLINGS[1:3], ("plain",), ("opposite",))


def make_case(
    rules: Sequence[Rule],
    vocab_size: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
    kinds: CaseKinds = ALL_KINDS,
) -> WalkCase:
    """Make a random case in which the rules of the batch are `rules`."""
    random, noise = Random(seed), torch.Generator().manual_seed(seed)
    tokens, parents, counts, prefixes, logits, drafts, samplings = [], [], [], [], [], [], []
    for i, rule in enumerate(rules):
        shapes = (*CHAINS[1:], *(kinds.shapes if rule.takes_trees else ())) if i else CHAINS
        shape = random.choice(shapes)
        x = make_logits(random.choice(kinds.logits), len(shape), vocab_size, random, noise)
        kind = random.choice(kinds.drafts) if rule.uses_q else "far"
        q = make_q(x, kind, random, noise)
        own, sampled = choose_tokens(x, q, shape, random)
        tokens.append(own)
        parents.append(list(shape))
        counts += sampled
        prefixes.append([1] * random.choice((0, 0, 3)))
        logits.append(x)
        drafts.append(q)
        samplings.append(random.choice(kinds.samplings))
    q = torch.cat(drafts).to(random.choice((torch.float32, torch.bfloat16, torch.float64)))
    tree = TokenTree(tokens, parents, q, num_sampled_children=tuple(counts))
    tree = tree.prepend_committed(prefixes, prefixes)
    seeds = [(random.choice(SEEDS), random.randrange(3)) for _ in rules]
    case = WalkCase(
        torch.cat(logits).to(dtype), tree, SeededNoise(tree, seeds, [random.randrange(5000) for _ in rules]), rules,
        samplings,
    )  # fmt: skip
    return copy_samples(case, random)


def make_logits(kind: str, num_rows: int, vocab_size: int, random: Random, noise: torch.Generator) -> Tensor:
    x = torch.randn(num_rows, vocab_size, generator=noise) * {"peaked": 6.0, "wide": 60.0, "flat": 0.0}.get(kind, 1.5)
    if kind == "ties":
        x = x.round()
    if kind == "masked":
        x[torch.rand(x.shape, generator=noise) < 0.7] = -math.inf
        x[:, vocab_size // 2] = 0
    if kind == "broken":
        row = random.randrange(num_rows)
        x[row, random.randrange(vocab_size)] = random.choice((math.nan, math.inf))
        x[random.randrange(num_rows)] = random.choice((-math.inf, 0.0))
    return x


def make_q(x: Tensor, kind: str, random: Random, noise: torch.Generator) -> Tensor:
    """Make rows of q: those of the target, near it, far from it, opposite, of few tokens, of zeros, or invalid."""
    if kind == "none":
        return torch.zeros_like(x)
    base = torch.zeros_like(x) if kind == "far" else x.nan_to_num(0, 9, -math.inf).clamp_min(-1e4)
    base = -base if kind == "opposite" else base
    strength = 0.0 if kind == "equal" else 0.7
    q = torch.softmax(base + strength * torch.randn(x.shape, generator=noise), -1)
    if kind == "few":  # tokens with a probability, at least two
        q = torch.where(q >= q.topk(max(q.shape[1] // 8, 2)).values[:, -1:], q, 0.0)
    if kind == "broken":
        row = random.randrange(len(q))
        q[row] = random.choice((torch.zeros_like(q[row]), q[row] * math.nan, q[row] - 0.5 / len(q[row]), q[row] * 3))
    return q


def choose_tokens(x: Tensor, q: Tensor, shape: Sequence[int], random: Random) -> tuple[list[int], list[int]]:
    """Choose the tokens of the nodes: some children sampled from q, the others deterministic. Returns their numbers."""
    tokens, counts = [1] * len(shape), []
    for node in range(len(shape)):
        children = [child for child, parent in enumerate(shape) if parent == node]
        masses = q[node].nan_to_num(0).clamp_min(0)
        count = random.choice((len(children), len(children), len(children) // 2))
        count = min(count, int(masses.count_nonzero()))
        counts.append(count if q[node].any() else random.randrange(3))
        likeliest = x[node].nan_to_num(0).topk(min(len(children) + 1, x.shape[1])).indices.tolist()
        generator = torch.Generator().manual_seed(random.randrange(1 << 30))
        sampled = torch.multinomial(masses, count, generator=generator).tolist() if count else []
        rest = [token for token in likeliest if token not in sampled]
        for child, token in zip(children, sampled + rest, strict=False):
            tokens[child] = token
        if children and random.random() < 0.06:  # a token that no correct drafter proposes
            tokens[random.choice(children)] = x.shape[1] + 3
    return tokens, counts


def copy_samples(case: WalkCase, random: Random) -> WalkCase:
    """Give most nodes under a rule that compares samples a child with the token that the target samples."""
    probs, tree = case.make_probs("cpu"), case.tree
    for b, rule in enumerate(case.rules):
        for node in range(tree.roots[b], tree.sizes[b]) if rule.shares_noise else ():
            children = tree.children[b][node]
            (token,) = probs.sample_tokens([tree.get_row(b, node)], case.noise.get_key)
            if children and token >= 0 and random.random() < 0.8:
                tree.tokens[b][random.choice(children)] = token
    return case


def add_prompt_chunk(case: WalkCase) -> WalkCase:
    """Add a request that computes a part of its prompt: no row, no root."""
    tree = case.tree
    assert tree.committed_next is not None
    longer = replace(
        tree, tokens=[*tree.tokens, [1, 2, 3]], parents=[*tree.parents, [-1, 0, 1]],
        committed_next=(*tree.committed_next, (2, 3, 4)),
    )  # fmt: skip
    noise = SeededNoise(longer, [*case.noise.seeds, (0, 0)], [*case.noise.positions, 9])
    return replace(case, tree=longer, noise=noise, rules=[*case.rules, case.rules[0]],
                   samplings=[*case.samplings, Sampling()])  # fmt: skip


def add_further_samples(case: WalkCase, b: int) -> WalkCase:
    """Give request b the samples of a second drafter, which the device does not verify."""
    root = case.tree.roots[b]
    children = tuple(child - root for child in case.tree.children[b][root])
    further = {(b, 0): (SampledSiblings(torch.full((case.logits.shape[1],), 1.0), children),)}
    tree = replace(case.tree, further_samples=further)
    return replace(case, tree=tree, noise=replace(case.noise, tree=tree))


def count_outcomes(case: WalkCase, commit: Commit) -> Counter[str]:
    """Count what a test must have seen: accepted and rejected drafts, whole paths, failures, early ends."""
    counts: Counter[str] = Counter()
    for b, rule in enumerate(case.rules):
        accepted = len(commit.paths[b]) - 1 - case.tree.roots[b]
        kind = rule.name
        counts[f"{kind} failed"] += b in commit.failed
        counts[f"{kind} accepted"] += accepted > 0
        counts[f"{kind} deep"] += accepted > 1
        counts[f"{kind} rejected"] += accepted == 0 and case.tree.sizes[b] > case.tree.roots[b] + 1
        last = commit.paths[b][-1] if commit.paths[b] else 0
        counts[f"{kind} later sibling"] += any(
            child in case.tree.children[b][parent][1:] for parent, child in pairwise(commit.paths[b])
        )
        counts[f"{kind} invalid after a draft"] += bool(commit.paths[b]) and commit.tokens[b][-1] in [
            case.tree.tokens[b][child] for child in case.tree.children[b][last]
        ]
    return counts
