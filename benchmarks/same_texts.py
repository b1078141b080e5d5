"""Outputs of every method, rule and kind of setting, to compare two versions of Foredraft.

    python benchmarks/same_texts.py --out before.json          # with the older version
    python benchmarks/same_texts.py --compare before.json      # with the newer version; exit code 1 if different

Seeds and draft lengths are fixed. So a change that only renames or moves code gives the same tokens, the same numbers
of draft tokens and accepted tokens, and bit-equal log-probabilities on the same processor.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foredraft import LLM, Grammar, Sampling, Seq2Seq

TOKENS = 40  # output tokens per request
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n",
    "    for key, value in sorted(items.items()):\n        for key, value in sorted(",
    '"""Return the sum of a list of numbers."""\n',
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.95, "seed": 2, "logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "seed": 3, "repetition_penalty": 1.1},
    {"temperature": 1.0, "min_p": 0.05, "seed": 4, "n": 2},
    {"temperature": 0.0, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logprobs": 1},
    {"temperature": 1.0, "typical_p": 0.9, "seed": 5, "bad_words": ["self"]},
    {"temperature": 0.9, "seed": 6, "stop": ["\n\n"], "min_tokens": 8},
    {"temperature": 0.0, "logit_bias": {100: 4.0, 200: -4.0}, "stop": ["return"]},
    {"temperature": 0.0, "grammar": Grammar.regex("[a-z_ ]{5,60}")},
)
SINGLE = (
    "draft_model:3", "ngram:6", "ngram_lm:5", "suffix:6", "lookahead:5", "token_recycling:5", "aggressive:6",
    "medusa:4", "blockwise:3", "hydra:3", "mlp_speculator:3", "chimera:3", "eagle:4", "eagle3:4", "dflash:4",
    "early_exit:3",
)  # fmt: skip
TREES = ("medusa:4:tree_nodes=12", "eagle:4:tree_nodes=12", "eagle3:4:tree_nodes=12", "mlp_speculator:3:tree_nodes=10")
# Ensembles choose by measured time, so only the output of `match` is repeatable.
ENSEMBLES = ("suffix+draft_model:4", "ngram+eagle3:4", "auto:4")
SEQ2SEQ = ("aggressive:8", "draft_model:3")


def parse_spec(text: str) -> tuple[dict[str, Any], int]:
    method, length, *options = text.split(":")
    pairs = (option.split("=") for option in options)
    return {"method": method, **{key: int(value) for key, value in pairs}}, int(length)


def sample_settings(first: int, rule: str) -> list[Sampling]:
    settings_by_prompt = [SETTINGS[(first + i) % len(SETTINGS)] for i in range(len(PROMPTS))]
    return [Sampling(max_tokens=TOKENS, ignore_eos=True, **settings) for settings in settings_by_prompt]


def generate_cases(plain: LLM) -> Iterator[tuple[str, LLM, int]]:
    """Generate cases as (name, LLM, index of the first setting)."""
    yield "none", plain, 0
    yield "none", plain, 4
    yield "none", plain, 8
    for index, text in enumerate((*SINGLE, *TREES)):
        spec, length = parse_spec(text)
        rules = ("match", "reject", "typical") if text in TREES else ("match", "reject", "block", "typical")
        for rule_index, rule in enumerate(rules):
            yield f"{text} {rule}", plain.with_drafter(dict(spec), length, rule), index + 3 * rule_index
    for index, text in enumerate(ENSEMBLES):
        spec, length = parse_spec(text)
        yield f"{text} match", plain.with_drafter(dict(spec), length, "match"), 2 * index


def write_texts() -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for kind, options in (("", {}), ("int8 ", {"quantization": "int8"}), ("torch ", {"fused": False})):
        plain = LLM("builtin", None, num_speculative_tokens=4, **options)
        for name, llm, first in generate_cases(plain):
            if kind and not name.startswith(("none", "draft_model", "eagle3")):
                continue
            print_progress(f"{kind}{name}")
            completions = llm.generate(list(PROMPTS), sample_settings(first, name))
            for i, completion in enumerate(completions):
                outputs[f"{kind}{name} [{first}] {i}"] = describe_completion(
                    completion, is_counted=name[:4] not in ("auto", "none") and "+" not in name
                )
    seq2seq = LLM("builtin-seq2seq", None)
    sources = [Seq2Seq("The quick brown fox jumps ovr the lazy dog."), Seq2Seq("Retrun the sum of two nubmers.")]
    for text in SEQ2SEQ:
        spec, length = parse_spec(text)
        for rule in ("match", "reject"):
            print_progress(f"seq2seq {text} {rule}")
            llm = seq2seq.with_drafter(dict(spec), length, rule)
            samplings = [Sampling(max_tokens=TOKENS, temperature=t, seed=9) for t in (0.0, 0.9)]
            for i, completion in enumerate(llm.generate(sources, samplings)):
                outputs[f"seq2seq {text} {rule} {i}"] = describe_completion(completion, is_counted=True)
    print(file=sys.stderr)
    return outputs


def describe_completion(completion: Any, is_counted: bool) -> dict[str, Any]:
    logprobs = completion.logprobs or ()
    counts = [completion.stats.num_drafted, completion.stats.num_accepted] if is_counted else []
    return {
        "tokens": list(completion.token_ids),
        "text": completion.text,
        "end": completion.finish_reason,
        "logprobs": [entry.logprob.hex() for entry in logprobs],
        "drafted and accepted": counts,
    }


def print_progress(text: str) -> None:
    print(f"\r{text:60}", end="", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file for the outputs")
    parser.add_argument("--compare", type=Path, help="file of the other version")
    options = parser.parse_args()
    outputs = write_texts()
    if options.out:
        options.out.write_text(json.dumps(outputs, indent=1))
    differences = []
    if options.compare:
        before = json.loads(options.compare.read_text())
        differences = sorted(name for name in before.keys() | outputs.keys() if before.get(name) != outputs.get(name))
        for name in differences[:20]:
            print(f"{name}\n  before {before.get(name)}\n  now    {outputs.get(name)}")
        print(f"{len(before)} texts before, {len(outputs)} now, {len(differences)} different")
    else:
        print(f"{len(outputs)} texts")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
