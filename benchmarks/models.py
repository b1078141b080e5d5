"""Table of supported models, from a small random model of every causal family in transformers.

Each model is saved, loaded from its folder and decoded greedily with prompt lookup. The output must equal that of
`generate` in transformers. `python benchmarks/models.py --write docs/models.md` puts the tables into the page, between
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from foredraft import LLM, ForedraftError, Sampling, Seq2Seq
from foredraft.models.compatibility import REMEDY
from foredraft.models.encdec import bart, t5
from tests.support.hybrids import HYBRIDS, REFUSED_HYBRIDS

VOCAB, NEW_TOKENS = 128, 24
FAULTS = ("differs", "fails")  # kinds of outcomes that are faults of Foredraft
MAX_SECONDS = 60  # for one family
PROMPT = [5, 9, 7, 11, 5, 9, 7, 11, 5, 9]
# Sizes by their names in configurations; a configuration gets the names that it has.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "emb_dim": 64, "embed_dim": 64,
    "word_embed_proj_dim": 64, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "ffn_hidden_size": 96, "d_ff": 96,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "num_hidden_layers": 4, "n_layer": 4, "num_layers": 2, "n_layers": 4,
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "d_kv": 16, "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256,
    "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "moe_intermediate_size": 32, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB, "initializer_range": 0.2, "init_std": 0.2, "rotary_dim": 8,
}  # fmt: skip
# Models with recurrent layers need sizes that agree with each other: those of the tests.
RECURRENT = {make().model_type: make for make in (HYBRIDS | REFUSED_HYBRIDS).values()}
# Changes of SIZES, tried in turn: latent attention needs as many key heads as query heads and derives the head size.
VARIANTS = ({}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": None})
TABLES = re.compile(r"(?<=<!-- models: begin -->\n).*?(?=<!-- models: end -->)", re.DOTALL)


@dataclass(frozen=True)
class FamilyOutcome:
    family: str
    kind: str  # native, runs, refused, differs, fails, unmade
    words: str = ""  # reason or error


def list_families(is_seq2seq: bool) -> list[str]:
    """List model types with a language-model head in transformers."""
    families = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if is_seq2seq else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if is_seq2seq:  # other families are refused by name; some models have many gigabytes at any size
        return sorted(set(families) & {*t5.FAMILIES, *bart.FAMILIES})
    return sorted(set(families) - set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES))


def make_model(family: str, is_seq2seq: bool, variant: dict[str, int | None]) -> Any:
    """Make a small random model of a family."""
    torch.manual_seed(0)
    if family in RECURRENT:
        return transformers.AutoModelForCausalLM.from_config(RECURRENT[family]()).eval().float()
    all_sizes = {name: value for name, value in (SIZES | variant).items() if value is not None}
    config_class = transformers.CONFIG_MAPPING[family]
    default = config_class()
    text_config = default if is_seq2seq else default.get_text_config(decoder=True)
    sizes = {name: value for name, value in all_sizes.items() if getattr(text_config, name, None) is not None}
    config = (
        config_class(**sizes)
        if text_config is default
        else config_class(**{_find_text_key(default, text_config): text_config.__class__(**sizes).to_dict()})
    )
    auto_class = transformers.AutoModelForSeq2SeqLM if is_seq2seq else transformers.AutoModelForCausalLM
    return auto_class.from_config(config).eval().float()


def _find_text_key(config: Any, text_config: Any) -> str:
    return next(name for name in config.sub_configs if getattr(config, name, None) is text_config)


def try_family(family: str, is_seq2seq: bool, folder: Path) -> FamilyOutcome:
    expected, error_line = None, ""
    for variant in VARIANTS:
        try:
            expected = decode_reference(make_model(family, is_seq2seq, variant), folder)
            break
        except TimeoutError as error:
            return FamilyOutcome(family, "unmade", str(error))
        except Exception as error:  # a family may object to these sizes in any way
            error_line = error_line or f"{type(error).__name__}: {error}".splitlines()[0]
    if expected is None:
        return FamilyOutcome(family, "unmade", error_line)
    try:
        llm = LLM(folder, drafter="ngram", num_speculative_tokens=3)
        prompt = Seq2Seq(PROMPT) if is_seq2seq else PROMPT
        [completion] = llm.generate([prompt], Sampling(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
    except ForedraftError as error:
        reason = str(error).removesuffix(REMEDY)  # the page names the remedy once
        return FamilyOutcome(family, "refused", re.sub(r"^it \((\w+)\)", r"\1", reason.replace(str(folder), "it")))
    except Exception as error:  # any other error is a fault, not a refusal
        return FamilyOutcome(family, "fails", f"{type(error).__name__}: {error}".splitlines()[0])
    if completion.token_ids != expected[-NEW_TOKENS:]:
        return FamilyOutcome(family, "differs")
    is_native = getattr(llm.target, "native" if is_seq2seq else "fused", None) is not None
    return FamilyOutcome(family, "native" if is_native else "runs")


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
                outcomes.append(try_family(family, is_seq2seq, Path(folder)))
            finally:
                signal.alarm(0)
        print(f"{family}: {outcomes[-1].kind} {outcomes[-1].words}", flush=True)
        gc.collect()
    return outcomes


def format_table(outcomes: list[FamilyOutcome]) -> str:
    """Format a Markdown table of families by outcome, with refusals by reason."""

    def list_names(kind: str) -> str:
        return ", ".join(f"`{o.family}`" for o in outcomes if o.kind == kind) or "none"

    lines = ["| | families |", "|---|---|", f"| native code on CPU | {list_names('native')} |"]
    lines.append(f"| on torch's operators | {list_names('runs')} |")
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.kind == "refused":
            reasons.setdefault(outcome.words, []).append(f"`{outcome.family}`")
    lines += [f"| refused: {reason} | {', '.join(families)} |" for reason, families in sorted(reasons.items())]
    lines.append(f"| not tried: no small model could be made | {list_names('unmade')} |")
    lines += [
        f"| fault: {o.words or 'output differs from transformers'} | `{o.family}` |"
        for o in outcomes
        if o.kind in FAULTS
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="families to try")
    parser.add_argument("--write", type=Path, help="page that gets the tables")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    signal.signal(signal.SIGALRM, raise_timeout)
    sections = []
    for title, is_seq2seq in (("Decoder-only", False), ("Encoder-decoder", True)):
        families = [name for name in list_families(is_seq2seq) if not options.only or name in options.only]
        sections.append(f"### {title} models\n\n{format_table(try_families(families, is_seq2seq))}")
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
