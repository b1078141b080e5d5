"""Programs of a comparison, their modes, and the arguments of their scripts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.bench.methods import PLAIN, BenchMethod

FOREDRAFT = "foredraft"
# llama.cpp's names for what --quantization calls int8 and int4
GGUF_NAMES = {"int8": "Q8_0", "int4": "Q4_0"}


@dataclass(frozen=True)
class Participant:
    """One process."""

    program: str
    script: str
    python: Path | None  # None: not given
    modes: tuple[str, ...]
    weights: str  # what its matrices are stored as
    group: str  # participants of one group are set against one another
    load_arguments: dict[str, Any] = field(default_factory=dict)  # beside the settings that all programs get
    has_verify_op: bool = True

    @property
    def python_path(self) -> Path | None:
        """The interpreter; a virtual environment's folder will do."""
        folder = self.python
        return folder / "bin" / "python" if folder is not None and folder.is_dir() else folder


@dataclass(frozen=True)
class PeerPythons:
    """The interpreters of the peers; None = absent."""

    foredraft: Path
    transformers: Path | None
    llama_cpp: Path | None
    vllm: Path | None


def iter_participants(
    pythons: PeerPythons,
    methods: Sequence[BenchMethod],
    dtype: str,
    quantizations: Sequence[str],
    settings: dict[str, Any],
) -> Iterator[Participant]:
    """Ours first: its plain decoding is what the others are set against."""
    drafters = {method.label: method.spec for method in methods}
    for quantization in (None, *quantizations):
        group = quantization or dtype
        own = settings | ({} if quantization is None else {"quantization": quantization})
        yield Participant(
            FOREDRAFT, "peer_foredraft.py", pythons.foredraft, (PLAIN, *drafters), group, group,
            {"drafters": drafters, "settings": own},
        )  # fmt: skip
        modes = (PLAIN, "prompt_lookup", "draft") if quantization is None else (PLAIN,)
        yield Participant(
            "llama.cpp", "peer_llama_cpp.py", pythons.llama_cpp, modes, GGUF_NAMES.get(group, group), group,
            {"quantization": quantization},
        )  # fmt: skip
    yield Participant(
        "transformers", "peer_transformers.py", pythons.transformers, (PLAIN, "prompt_lookup", "assisted"), dtype, dtype
    )
    for mode in (PLAIN, "ngram", "draft"):
        yield Participant(
            "vllm", "peer_vllm.py", pythons.vllm, (mode,), dtype, dtype, {"mode": mode}, has_verify_op=False
        )
