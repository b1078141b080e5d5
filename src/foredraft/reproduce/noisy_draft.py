"""Draft models of graded quality: the built-in target with noise on its weights."""

from pathlib import Path

import torch

from foredraft import zoo
from foredraft.models.loading import load_model, load_tokenizer


def write_noisy_target(size: float, folder: Path, seed: int = 0) -> None:
    """Write a copy of the built-in target with normal noise on every matrix.

    Args:
        size: standard deviation of the noise over that of the entries of the matrix.
        folder: folder of the copy.
        seed: seed of the noise.
    """
    source = str(zoo.find_target_folder(zoo.DEFAULT_TARGET))
    model = load_model(source, "auto", torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # norms stay
                noise = torch.randn(weight.shape, generator=generator) * (size * float(weight.float().std()))
                weight.add_(noise.to(weight.dtype))
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None, "the built-in target has a tokenizer"
    tokenizer.save_pretrained(folder)
