"""Numbers that identify the weights of a target."""

from typing import Any

from foredraft.models.hf import HFModel

FINGERPRINT_ROWS = 64  # rows of the embedding that identify the target, spread evenly


def fingerprint_target(target: HFModel) -> dict[str, Any]:
    """Identify the target from a sample of its embedding: weights may change under the same name."""
    sample = target.embedding[:: max(1, len(target.embedding) // FINGERPRINT_ROWS)].double()
    return {
        "parameters": target.num_parameters,
        "vocab_size": target.vocab_size,
        "sum": float(f"{float(sample.sum()):.9g}"),
    }
