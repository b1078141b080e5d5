"""Training documents of the built-in heads: texts that the built-in target generates, and files of the corpus.

A drafter predicts the target, not the corpus, so the target generates a part of the documents.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.sampling.params import Sampling

BATCH_TEXTS = 64  # documents generated in one batch
PROMPT_TOKENS = (32, 160)  # shortest and longest prompt from the corpus, in tokens; the upper bound is exclusive
MAX_NEW_TOKENS = 160  # tokens generated per document
GREEDY_SHARE = 0.5  # share of greedy documents; the others are sampled at temperature 1
NUM_DOCUMENTS = 10_000  # generated documents
CORPUS_TOKENS = 1_000_000  # tokens of corpus files
MAX_FILE_TOKENS = 4000  # longest part of a file that is used
MIN_FILE_TOKENS = 300  # files with at most this many tokens are left out


def generate_documents(llm: Any, ids: np.ndarray, count: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield documents of token ids: the end-of-text id, a part of the corpus, and its continuation by an LLM.

    Args:
        llm: LLM that continues the parts.
        ids: token ids of the corpus, [T].
        count: number of documents.
        seed: seed of the prompts and of sampling. Default 0.
    """
    rng = np.random.default_rng(seed)
    for start in range(0, count, BATCH_TEXTS):
        size = min(BATCH_TEXTS, count - start)
        lengths = rng.integers(*PROMPT_TOKENS, size)
        offsets = rng.integers(0, len(ids) - PROMPT_TOKENS[1], size)
        prompts = [ids[offset : offset + n].astype(int).tolist() for offset, n in zip(offsets, lengths, strict=True)]
        samplings = [
            Sampling(max_tokens=MAX_NEW_TOKENS, temperature=float(rng.random() >= GREEDY_SHARE), seed=seed + start + i)
            for i in range(size)
        ]
        for prompt, completion in zip(prompts, llm.generate(prompts, samplings), strict=True):
            yield np.array([0, *prompt, *completion.token_ids], dtype=np.uint16)


def take_file_openings(ids: np.ndarray, tokens: int, seed: int = 1) -> Iterator[np.ndarray]:
    """Yield beginnings of corpus files in random order.

    Args:
        ids: token ids of the corpus, [T]; id 0 begins a file.
        tokens: the generator ends after the file with which it exceeds this number of tokens.
        seed: seed of the order. Default 1.
    """
    files = [file for file in np.split(ids, np.flatnonzero(ids == 0)[1:]) if len(file) > MIN_FILE_TOKENS]
    np.random.default_rng(seed).shuffle(files)
    count = 0
    for file in files:
        if count > tokens:
            return
        yield file[:MAX_FILE_TOKENS]
        count += min(len(file), MAX_FILE_TOKENS)


def write_texts(llm: Any, ids: np.ndarray, path: Path, documents: int, tokens: int) -> None:
    """Write generated documents and corpus files to `path` as one array of token ids, [T] uint16.

    Args:
        llm: LLM that generates documents.
        ids: token ids of the corpus, [T].
        path: .npy file.
        documents: number of generated documents.
        tokens: number of tokens from corpus files.
    """
    texts = [*generate_documents(llm, ids, documents), *take_file_openings(ids, tokens)]
    partial = path.with_suffix(".tmp.npy")
    np.save(partial, np.concatenate(texts).astype(np.uint16))
    partial.replace(path)
