"""Which walk of the kernels verifies a request."""

from foredraft.kernels.tree_walk import TreeWalk
from foredraft.tree import TokenTree
from foredraft.verification.rule import Rule, VerifyFunction
from foredraft.verification.rules import block, match, reject

# By function and not by rule: a rule that is made from another with its own function has none.
WALKS: tuple[tuple[VerifyFunction, TreeWalk], ...] = (
    (match, TreeWalk.SAMPLES),
    (reject, TreeWalk.TRIALS),
    (block, TreeWalk.CHAIN),
)


def get_walk(rule: Rule) -> TreeWalk | None:
    """Return the walk of kernels that commits what a rule does; None if there is none."""
    return next((walk for function, walk in WALKS if function is rule.verify), None)


def find_walk(tree: TokenTree, b: int, rule: Rule) -> TreeWalk | None:
    """Return the walk of a rule over the draft of request b; None if kernels have none.

    Further samples of a node need rows of q that kernels do not read.
    """
    walk = get_walk(rule)
    if walk is None or not (rule.takes_trees or _is_chain(tree, b)):
        return None
    has_further = tree.further_samples and any(owner == b for owner, _ in tree.further_samples)
    return None if has_further else walk


def _is_chain(tree: TokenTree, b: int) -> bool:
    parents = tree.parents[b]
    return all(parent == node - 1 for node, parent in enumerate(parents))
