"""Text for the built-in drafting heads: what the built-in target writes itself, and files of the corpus.

A drafter predicts the target, not the corpus, so the target writes a good part of the training documents.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.sampling.params import Sampling

BATCH_TEXTS = 64  # texts written together
PROMPT_TOKENS = (32, 160)  # tokens of the corpus a text goes on from
MAX_NEW_TOKENS = 160  # tokens it writes
GREEDY_SHARE = 0.5  # the others are drawn at temperature 1
NUM_DOCUMENTS = 3200
CORPUS_TOKENS = 1_400_000  # of files beside them
MAX_FILE_TOKENS = 4000  # of one file at most
MIN_FILE_TOKENS = 300  # a file with fewer tokens is left out


def generate_documents(llm: Any, ids: np.ndarray, count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """`count` documents of token ids, each a stretch of the corpus ids [T] and what an LLM makes of it, end of text
    first as in the corpus."""
    rng = np.random.default_rng(seed)
    for start in range(0, count, BATCH_TEXTS):
        size = min(BATCH_TEXTS, count - start)
        lengths = rng.integers(*PROMPT_TOKENS, size)
        places = rng.integers(0, len(ids) - PROMPT_TOKENS[1], size)
        prompts = [ids[place : place + n].astype(int).tolist() for place, n in zip(places, lengths, strict=True)]
        samplings = [
            Sampling(max_tokens=MAX_NEW_TOKENS, temperature=float(rng.random() >= GREEDY_SHARE), seed=seed + start + i)
            for i in range(size)
        ]
        for prompt, completion in zip(prompts, llm.generate(prompts, samplings), strict=True):
            yield np.array([0, *prompt, *completion.token_ids], dtype=np.uint16)


def take_file_openings(ids: np.ndarray, tokens: int, seed: int = 1) -> Iterator[np.ndarray]:
    """Beginnings of files of the corpus ids [T], in random order, until they hold so many tokens."""
    files = [file for file in np.split(ids, np.flatnonzero(ids == 0)[1:]) if len(file) > MIN_FILE_TOKENS]
    np.random.default_rng(seed).shuffle(files)
    count = 0
    for file in files:
        if count > tokens:
            return
        yield file[:MAX_FILE_TOKENS]
        count += min(len(file), MAX_FILE_TOKENS)


def write_texts(llm: Any, ids: np.ndarray, path: Path, documents: int, tokens: int) -> None:
    """Both kinds of text as one array of ids."""
    texts = [*generate_documents(llm, ids, documents), *take_file_openings(ids, tokens)]
    partial = path.with_suffix(".tmp.npy")
    np.save(partial, np.concatenate(texts).astype(np.uint16))
    partial.replace(path)
