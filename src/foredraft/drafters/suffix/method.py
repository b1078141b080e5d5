"""Declaration of the method `suffix`."""

from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.counterpart import Counterpart, set_as
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.suffix.corpus import read_corpus
from foredraft.drafters.suffix.drafter import MIN_STORE_TOKENS, Config, SuffixDrafter
from foredraft.drafters.suffix.native_automaton import get_automaton_class
from foredraft.drafters.suffix.variants import VARIANTS
from foredraft.errors import ForedraftError


def create(config: Config, context: DrafterContext) -> SuffixDrafter:
    """Make the drafter, and read its files. Raises ForedraftError for invalid options and unreadable files."""
    plan = TreeSpec.from_options(context.num_speculative_tokens, config.tree_nodes, config.top_k)
    if not 0 <= config.min_confidence < 1:
        raise ForedraftError(f"min_confidence must lie in 0..1, got {config.min_confidence}")
    for name, lowest in (("min_match", 1), ("free_tokens", 0), ("tokens_per_match", 0), ("store_tenants", 1)):
        if not getattr(config, name) >= lowest:
            raise ForedraftError(f"{name} must be at least {lowest}, got {getattr(config, name)}")
    if config.store_outputs is not None and config.store_outputs < 0:
        raise ForedraftError(f"store_outputs must be 0 (none) or more, got {config.store_outputs}")
    if config.store_tokens and config.store_tokens < MIN_STORE_TOKENS:
        raise ForedraftError(f"store_tokens must be 0 (none) or at least {MIN_STORE_TOKENS}, got {config.store_tokens}")
    paths = (config.files,) if isinstance(config.files, str) else config.files
    files = read_corpus(paths, context, get_automaton_class()()) if paths else None
    return SuffixDrafter(config, plan, context, files)


METHOD = Method(
    name="suffix",
    config=Config,
    create=create,
    uses_model=False,
    auto_rank=20,
    option_aliases={
        "suffix_decoding_max_spec_factor": lambda value: {"tokens_per_match": value, "free_tokens": 0},
        "suffix_decoding_min_token_prob": lambda value: {"min_confidence": value},
        "suffix_decoding_max_cached_requests": lambda value: {"store_outputs": value},
    },
    reads_tokens_alone=True,
    counterparts={
        "vllm": Counterpart(
            "suffix",
            options={
                "tokens_per_match": set_as("suffix_decoding_max_spec_factor"),
                "min_confidence": set_as("suffix_decoding_min_token_prob"),
                "store_outputs": set_as("suffix_decoding_max_cached_requests"),
            },
            note="vLLM's suffix needs the package arctic-inference there, and looks back 24 tokens",
        ),
        "sglang": Counterpart(
            "NGRAM", note="NGRAM is the nearest: a trie over the sequences of all requests, 18 tokens deep"
        ),
        "trtllm": Counterpart(
            "SA",
            options={
                "store_outputs": lambda count: {"enable_global_pool": True, "global_pool_size": count} if count else {}
            },
            note="SA copies after the longest match, without counts of what followed the others",
        ),
        "llama.cpp": Counterpart(
            "ngram-mod",
            draft_tokens=set_as("--spec-ngram-mod-n-max"),
            settings={"--spec-ngram-mod-n-min": 1},
            note="ngram-mod is the nearest: a hash of the last 24 tokens, with a pool that all requests share",
        ),
    },
    variants=VARIANTS,
)
