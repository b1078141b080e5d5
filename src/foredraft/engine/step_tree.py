"""Tree of a step, from the trees of the drafter."""

from foredraft.request import Batch
from foredraft.tree import TokenTree


def prepend_chunks(batch: Batch, draft: TokenTree) -> TokenTree:
    """Put each request's chunk of uncomputed tokens before its draft.

    The drafter's tree begins with the last token of the chunk. If that is the last committed token, it is the root.
    Otherwise every token of the chunk has a committed successor, and the tree has no root and no draft.
    """
    if max(batch.num_new_tokens) == 1 and all(batch.needs_logits):
        return draft  # every chunk is the root alone
    prefixes, committed_next = [], []
    for request, chunk in zip(batch.requests, batch.num_new_tokens, strict=True):
        start, end = request.num_computed, request.num_computed + chunk
        prefixes.append(request.get_tokens(start, end - 1))  # the chunk without its last token, which `draft` has
        # The successor of each token of the chunk. The last committed token has none; `get_tokens` stops there.
        committed_next.append(request.get_tokens(start + 1, end + 1))
    return draft.prepend_committed(prefixes, committed_next)
