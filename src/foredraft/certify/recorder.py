"""Records of verified steps: a verification function that notes what the engine passes to a rule."""

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from foredraft.certify.draft_tree import DraftTree
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise, SeededNoise
from foredraft.verification.probs import InvalidLogitsError, LazyTargetProbs, Probs, TargetProbs
from foredraft.verification.rule import Rule

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class StepRecord:
    """One request in one verified step. Nodes are counted from the root."""

    seed: int
    prefix: Tokens  # output tokens before the step; the last one is the root, unless the output is empty
    tree: DraftTree
    probs: tuple[Probs, ...]  # N distributions p after the nodes
    logits: Tensor | None  # [N, V] logits after the nodes, if the recorder keeps them
    tokens: Tokens  # committed tokens from the root on
    uniforms: tuple[float, ...]  # accept uniforms of the draft nodes, then the sample uniform of the last accepted node

    @property
    def num_drafted(self) -> int:
        """Draft nodes of the tree."""
        return len(self.tree.tokens) - 1

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens."""
        return len(self.tokens) - 1


@dataclass(eq=False)
class StepRecorder:
    """Verification function that runs a rule inside an engine and records its steps.

    Every request needs a seed of its own, by which the recorder recognises it.

    Attributes:
        rule: rule that decides.
        keeps_logits: whether records hold the logits.
        records: steps in the order of their verification.
    """

    rule: Rule
    keeps_logits: bool = False
    records: list[StepRecord] = field(default_factory=list)
    _outputs: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _trees: dict[object, DraftTree] = field(default_factory=dict)  # equal trees are one object

    def as_rule(self) -> Rule:
        """Return the rule with this recorder as its function."""
        return replace(self.rule, verify=self)

    def __call__(self, tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
        """Verify as the rule does."""
        commit = self.rule.verify(tree, p, noise)
        if not isinstance(p, LazyTargetProbs) or not isinstance(noise, SeededNoise):
            raise TypeError("a step recorder works inside an engine only")
        for b, (root, size) in enumerate(zip(tree.roots, tree.sizes, strict=True)):
            if root < size and b not in commit.failed:
                self.records.append(self._record(tree, p, noise, commit, b))
        return commit

    def _record(
        self, tree: TokenTree, probs: LazyTargetProbs, noise: SeededNoise, commit: Commit, b: int
    ) -> StepRecord:
        root, size = tree.roots[b], tree.sizes[b]
        rows = range(tree.get_row(b, root), tree.get_row(b, root) + size - root)
        seed = noise.seeds[b][0]
        prefix, tokens = tuple(self._outputs[seed]), tuple(commit.tokens[b][root:])
        self._outputs[seed].extend(tokens)
        draft = DraftTree.from_tree(tree, b)
        uniforms = [noise.accept_uniform(b, node) for node in range(root + 1, size)]
        return StepRecord(
            seed=seed,
            prefix=prefix,
            tree=self._trees.setdefault((prefix, draft.key), draft),
            probs=tuple(_read_probs(probs, row) for row in rows),
            logits=probs.logits[rows.start : rows.stop].clone() if self.keeps_logits else None,
            tokens=tokens,
            uniforms=(*uniforms, noise.sample_uniform(b, commit.paths[b][-1])),
        )


def _read_probs(probs: LazyTargetProbs, row: int) -> Probs:
    """Return a copy of a row of p; a row with invalid logits has no mass."""
    try:
        p = probs.get_probs(row)
    except InvalidLogitsError:
        return Probs(np.zeros(1), probs.logits.shape[-1], np.zeros(1, dtype=np.intp))
    return Probs(p.mass.copy(), p.vocab_size, p.ids)
