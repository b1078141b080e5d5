"""Ordered embeddings: tokens in clusters of equal size, of which a few have logits after a node."""

import torch
from torch import Tensor, nn

from foredraft.drafters.gemma4_assistant.shape import AssistantShape


class OrderedEmbedding(nn.Module):
    """Selection of clusters by their centroids.

    Cluster c has the tokens c V / C to (c + 1) V / C - 1 of `token_ordering`.
    """

    token_ordering: Tensor  # [V] int64

    def __init__(self, shape: AssistantShape) -> None:
        super().__init__()
        self.num_centroids, self.num_selected = shape.num_centroids, shape.num_selected
        self.centroids = nn.Linear(shape.hidden, shape.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(shape.vocab_size))

    def select_tokens(self, hidden: Tensor) -> Tensor:
        """Return the tokens [R, W] of the clusters whose centroids fit the hidden states [R, H] best."""
        clusters = self.centroids(hidden).topk(self.num_selected, -1).indices  # [R, num_selected]
        return self.token_ordering.view(self.num_centroids, -1)[clusters].flatten(1)

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Compute logits [R, V] with an output matrix [V, H]; tokens of other clusters have -inf."""
        tokens = self.select_tokens(hidden)
        rows = weight.index_select(0, tokens.flatten()).view(*tokens.shape, -1)  # [R, W, H]
        # measured in bfloat16 on CPU: a tenth of the time of einsum
        selected = torch.bmm(rows, hidden[..., None])[..., 0]
        every = selected.new_full((len(hidden), len(weight)), -torch.inf)
        return every.scatter_(1, tokens, selected)
