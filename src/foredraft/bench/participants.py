"""Programs of a comparison, their modes, and the arguments of their scripts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.bench.methods import PLAIN, BenchMethod

FOREDRAFT = "foredraft"
# Value of --quantization -> type of a GGUF file.
GGUF_NAMES = {"int8": "Q8_0", "int4": "Q4_0"}


@dataclass(frozen=True)
class Participant:
    """One process of a comparison: a program with given weights and the modes it runs."""

    program: str
    script: str  # file in bench/peers
    python: Path | None  # interpreter or virtual environment; None = not given
    modes: tuple[str, ...]
    weights: str  # storage type of the matrices, as the program names it
    group: str  # participants of one group are compared with each other
    load_arguments: dict[str, Any] = field(default_factory=dict)  # beyond the settings that all programs share
    has_verify_op: bool = True
    has_limits_op: bool = False  # measures the limits of a pass over its weights

    @property
    def python_path(self) -> Path | None:
        """Path of the interpreter, also if `python` is the folder of a virtual environment."""
        path = self.python
        return path / "bin" / "python" if path is not None and path.is_dir() else path


@dataclass(frozen=True)
class PeerPythons:
    """Interpreters of the programs; None = absent."""

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
    """Iterate over all participants. Foredraft comes first in a group, as its plain decoding is the reference."""
    drafters = {method.label: method.spec for method in methods}
    for quantization in (None, *quantizations):
        group = quantization or dtype
        llm_settings = settings | ({} if quantization is None else {"quantization": quantization})
        yield Participant(
            FOREDRAFT, "peer_foredraft.py", pythons.foredraft, (PLAIN, *drafters), group, group,
            {"drafters": drafters, "settings": llm_settings}, has_limits_op=True,
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
