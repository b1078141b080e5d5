"""Verification rule: a function that verifies drafts, and the properties by which drafters and reports treat it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise
from foredraft.verification.probs import TargetProbs

# (tree, p, noise) -> commit; p is a tensor [R, V], or computed on demand
VerifyFunction = Callable[[TokenTree, Tensor | TargetProbs, Noise], Commit]


@dataclass(frozen=True, eq=False)  # compared by identity
class Rule:
    """Verification rule with its declared properties.

    Drafters, engine and reports read the properties. The name is text for options, messages and results; no code
    compares it.

    Attributes:
        name: name in options, messages and results.
        verify: the rule itself, a pure function of token trees, p and noise.
        takes_trees: whether it verifies trees. False = drafts must be chains.
        uses_q: whether it reads q, so that drafters sample and return the q of every sampled token.
        shares_noise: whether it samples the token at a position with the noise key of that position
            (`Noise.get_key`). A drafter that samples with this key chooses the same token if p and q agree.
        is_lossless: whether the output has the distribution of plain decoding.
        is_reproducible: whether the output of a seed is independent of the drafts.
        settings: names of the numbers that a user may set. They are fields of `verify`, which is a frozen dataclass.
        vllm_name: its name as vLLM's rejection_sample_method; "" = vLLM does not have it.
        samples_independently: whether it accepts most from siblings that were sampled with replacement. Drafters then
            sample the children of a fixed tree independently of each other, if they can. It reads `uses_q` too.
        simulated_rate: probability with which it accepts a draft token, whatever p is; the output is then simulated.
            Default None = it verifies by p.
    """

    name: str
    verify: VerifyFunction
    takes_trees: bool
    uses_q: bool
    shares_noise: bool
    is_lossless: bool
    is_reproducible: bool
    settings: tuple[str, ...] = ()
    vllm_name: str = ""
    samples_independently: bool = False
    simulated_rate: float | None = None

    def with_settings(self, values: Mapping[str, float]) -> "Rule":
        """Return the rule with other values of its settings; the rule itself if `values` is empty.

        Raises:
            ForedraftError: a value is out of range.
        """
        if not values:
            return self
        return replace(self, verify=replace(self.verify, **values))  # type: ignore[type-var]
