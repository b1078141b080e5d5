"""The accepted path of a request, and the commit of a batch that is made of such paths."""

from collections.abc import Callable

from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise
from foredraft.verification.probs import InvalidLogitsError, Probs, TargetProbs

CommittedPath = tuple[list[int], list[int]]  # (nodes of a path or of a part of it, the token after each of them)
# (batch index, node, p) -> the accepted child, or None and the distribution of the token in its place
SelectChild = Callable[[int, int, Probs], tuple[int | None, Probs]]


def verify_by_level(tree: TokenTree, probs: TargetProbs, noise: Noise, select_child: SelectChild) -> Commit:
    """Walk down every tree while `select_child` accepts a child; then sample the next token.

    The next token follows p if there is no child to accept.
    """

    def walk(b: int) -> CommittedPath:
        node = tree.roots[b]
        nodes: list[int] = []
        tokens: list[int] = []
        while True:
            try:
                p = probs.get_probs(tree.get_row(b, node))
            except InvalidLogitsError:
                if not nodes:
                    raise
                return nodes, tokens
            nodes.append(node)
            child, residual = select_child(b, node, p)
            if child is None:
                tokens.append(residual.sample(noise.sample_uniform(b, node)))
                return nodes, tokens
            tokens.append(tree.tokens[b][child])
            node = child

    return build_commit(tree, walk)


def build_commit(tree: TokenTree, walk: Callable[[int], CommittedPath]) -> Commit:
    """Join the committed prefix of every request with the path that `walk(b)` accepts from the root on."""
    paths: list[list[int]] = []
    tokens: list[list[int]] = []
    failed: set[int] = set()
    for b, (size, root) in enumerate(zip(tree.sizes, tree.roots, strict=True)):
        nodes, following = _get_committed_prefix(tree, b)
        if root < size:
            try:
                accepted_nodes, accepted_following = walk(b)
                nodes, following = nodes + accepted_nodes, following + accepted_following
            except InvalidLogitsError:
                failed.add(b)
                nodes, following = [], []
        paths.append(nodes)
        tokens.append(following)
    return Commit.from_lists(paths, tokens, failed=frozenset(failed))


def _get_committed_prefix(tree: TokenTree, b: int) -> CommittedPath:
    """Return the nodes before the root and the tokens after them. These are committed already and need no check."""
    following = tree.committed_next[b] if tree.committed_next else ()
    return list(range(len(following))), list(following)
