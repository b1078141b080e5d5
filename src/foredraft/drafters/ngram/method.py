"""Declaration of the method `ngram`."""

from foredraft import zoo
from foredraft.drafters.counterpart import Counterpart, set_as
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.ngram.drafter import Config, NgramDrafter
from foredraft.drafters.ngram.variants import VARIANTS
from foredraft.errors import ForedraftError


def create(config: Config, context: DrafterContext) -> NgramDrafter:
    """Make the drafter. Raises ForedraftError for invalid options."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if not 1 <= low <= high:
        raise ForedraftError(f"prompt_lookup_min ({low}) must lie in 1..prompt_lookup_max ({high})")
    for name in ("branches", "tokens_per_match"):
        if getattr(config, name) < 1:
            raise ForedraftError(f"{name} must be at least 1, got {getattr(config, name)}")
    return NgramDrafter(config, context.num_speculative_tokens)


METHOD = Method(
    name="ngram",
    config=Config,
    create=create,
    uses_model=False,
    auto_rank=10,
    default_ranks={None: 1, zoo.SEQ2SEQ_TARGET: 1},
    reads_tokens_alone=True,
    counterparts={
        "vllm": Counterpart(
            "ngram",
            options={name: set_as(name) for name in ("prompt_lookup_min", "prompt_lookup_max")},
            settings={"prompt_lookup_min": 1, "prompt_lookup_max": 4},
            note="vLLM's ngram takes the first match, and drafts the full length after a match of one token too",
        ),
        "sglang": Counterpart(
            "NGRAM", note="SGLang's NGRAM looks in a trie over the sequences of all requests, and drafts a tree"
        ),
        "trtllm": Counterpart(
            "NGram",
            options={"prompt_lookup_max": set_as("max_matching_ngram_size")},
            settings={"max_matching_ngram_size": 4, "is_public_pool": False},
        ),
        "llama.cpp": Counterpart(
            "ngram-simple",
            options={"prompt_lookup_max": set_as("--spec-ngram-simple-size-n")},
            draft_tokens=set_as("--spec-ngram-simple-size-m"),
            settings={"--spec-ngram-simple-size-n": 4},
            note="llama.cpp's ngram-simple looks for matches of one length alone",
        ),
    },
    variants=VARIANTS,
)
