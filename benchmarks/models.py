"""Table of supported models, from a small random model of every causal family in transformers.

Each model is saved, loaded from its folder and decoded greedily with prompt lookup. The output must equal that of
`generate` in transformers. `python -m benchmarks.models --write docs/models.md` puts the tables into the page, between
its markers.
"""

import argparse
import gc
import logging
import re
import signal
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from benchmarks.family_walk import KINDS, FamilyOutcome, list_causal_families, read_outcomes, walk_family
from benchmarks.small_families import make_model
from foredraft import LLM, ForedraftError, Sampling, Seq2Seq
from foredraft.models.encdec import bart, t5

NEW_TOKENS = 24
MAX_SECONDS = 60  # for one family
PROMPT = [5, 9, 7, 11, 5, 9, 7, 11, 5, 9]
TABLES = re.compile(r"(?<=<!-- models: begin -->\n).*?(?=<!-- models: end -->)", re.DOTALL)


def list_families(is_seq2seq: bool) -> list[str]:
    """List the decoder-only families of transformers, or the encoder-decoder families that are not refused by name."""
    if not is_seq2seq:
        return list_causal_families()
    return sorted(set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) & {*t5.FAMILIES, *bart.FAMILIES})


def try_seq2seq(family: str, folder: Path) -> FamilyOutcome:
    """Save, load and decode a small random encoder-decoder model."""
    try:
        expected = decode_reference(make_model(family, is_seq2seq=True), folder)
    except Exception as error:  # a family may object to these sizes in any way
        return FamilyOutcome(family, "unmade", f"{type(error).__name__}: {error}".splitlines()[0])
    try:
        llm = LLM(folder, drafter="ngram", num_speculative_tokens=3)
        sampling = Sampling(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        [completion] = llm.generate([Seq2Seq(PROMPT)], sampling)
    except ForedraftError as error:
        return FamilyOutcome(family, "refused", str(error).replace(str(folder), "it"))
    except Exception as error:  # any other error is a fault, not a refusal
        return FamilyOutcome(family, "fails", f"{type(error).__name__}: {error}".splitlines()[0])
    if completion.token_ids != expected[-NEW_TOKENS:]:
        return FamilyOutcome(family, "differs")
    return FamilyOutcome(family, "native" if getattr(llm.target, "native", None) is not None else "packed")


def decode_reference(model: Any, folder: Path) -> list[int]:
    """Return the output of `generate` in transformers, and save the model in `folder`."""
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = model.config.decoder_start_token_id = 0
    model.generation_config.forced_eos_token_id = None  # BART forces an end token at the maximum length
    model.generation_config.eos_token_id = None  # both sides generate all tokens
    ids = torch.tensor([PROMPT])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
    model.save_pretrained(folder)
    return list(tokens)


def raise_timeout(*_: object) -> None:
    raise TimeoutError(f"took longer than {MAX_SECONDS} s")


def try_families(families: Iterable[str], is_seq2seq: bool) -> list[FamilyOutcome]:
    outcomes = []
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            signal.alarm(MAX_SECONDS)  # default parts of some families are large at any size
            try:
                attempt = try_seq2seq if is_seq2seq else walk_family
                outcomes.append(attempt(family, Path(folder)))
            finally:
                signal.alarm(0)
        print(f"{family}: {outcomes[-1].kind} {outcomes[-1].words}", flush=True)
        gc.collect()
    return outcomes


def format_table(outcomes: list[FamilyOutcome]) -> str:
    """Format a Markdown table of families by outcome and reason."""
    lines = ["| | families |", "|---|---|"]
    for kind, title in KINDS.items():
        names: dict[str, list[str]] = {}
        for outcome in outcomes:
            if outcome.kind == kind:
                names.setdefault(outcome.words.replace("|", "/"), []).append(f"`{outcome.family}`")
        lines += [
            f"| {title}{': ' if words else ''}{words} | {', '.join(families)} |"
            for words, families in sorted(names.items())
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="families to try")
    parser.add_argument("--write", type=Path, help="page that gets the tables; others than --only stay")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, raise_timeout)
    sections = []
    for title, is_seq2seq in (("Decoder-only", False), ("Encoder-decoder", True)):
        families = [name for name in list_families(is_seq2seq) if not options.only or name in options.only]
        outcomes = {outcome.family: outcome for outcome in try_families(families, is_seq2seq)}
        if options.only and options.write is not None:
            outcomes = read_outcomes(options.write.read_text(encoding="utf-8"), title) | outcomes
        table = format_table([outcomes[family] for family in sorted(outcomes)])
        sections.append(f"### {title} models\n\n{table}")
    text = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}.\n\n" + "\n".join(
        sections
    )
    if options.write is None:
        print(text)
    else:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(TABLES.sub(lambda _: text, page), encoding="utf-8")


if __name__ == "__main__":
    main()
