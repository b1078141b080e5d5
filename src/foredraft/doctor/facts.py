"""Facts about machine, target and drafters that need no run of the engine."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.bench.machine_speed import measure_bandwidth
from foredraft.bench.report import describe_machine, get_model_name
from foredraft.doctor.candidate import Candidate
from foredraft.drafters.registry import resolve_method
from foredraft.drafters.spec import NO_DRAFT_SPEC
from foredraft.errors import ForedraftError
from foredraft.files.header import BITS, read_header
from foredraft.files.hub import find_revision
from foredraft.kernels.cpu.library import load_library
from foredraft.kv.sizing import get_available_memory
from foredraft.llm import LLM
from foredraft.models.wrap import explain_unsupported_model

BANDWIDTH_ROUNDS = 3
QUANTIZED_BITS = {"int8": 8, "int4": 4}
GPU_COPY_BYTES = 1 << 30  # bytes that a GPU copies to measure its bandwidth


@dataclass(frozen=True)
class MachineFacts:
    """The machine and the versions that the figures depend on."""

    device: str  # name of the processor or GPU
    description: dict[str, Any]  # as `bench.report.describe_machine` returns it
    kernels: str | None  # instruction set of the native kernels, "triton" on a GPU; None = torch's operators
    bandwidth: float | None  # GB/s of sequential reads with all threads, of the GPU on a GPU; None = not measured
    free_bytes: int  # memory that is free with the models loaded


@dataclass(frozen=True)
class TargetFacts:
    """The target, and the KV memory beside it."""

    name: str
    architecture: str
    parameters: int
    dtype: str
    quantization: str | None
    context_length: int
    vocab_size: int
    is_native: bool
    is_exact: bool  # whether drafts change no bit of its logits
    reason: str | None  # why it does not run as native code; None if it does
    weight_bytes: float  # computed from parameters and bits; scales of quantised weights are left out
    kv_bytes_per_token: int
    kv_tokens: int  # room of the KV pool in tokens, without a drafter
    context: int  # tokens of each request for `largest_batch`

    @property
    def largest_batch(self) -> int:
        """Requests of `context` tokens that fit into the KV memory at once."""
        return self.kv_tokens // self.context


@dataclass(frozen=True)
class DrafterFacts:
    """One drafter as it was recognised."""

    label: str
    method: str
    model: str | None
    parameters: int | None  # numbers in its files; None = it has no files
    dtype: str | None
    file_bytes: int
    kv_bytes_per_token: int
    vocabulary: str  # as `DrafterSpec.vocabulary`
    is_native: bool | None  # None = it has no network
    max_nodes: int
    is_chain: bool


def examine_machine(llm: LLM) -> MachineFacts:
    """Describe the machine, and measure its memory bandwidth."""
    device, native, description = llm.target.device, load_library(), describe_machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        bandwidth: float | None = _measure_gpu_bandwidth(device)
        kernels = None if llm.target.pool.kernels is None else "triton"
    else:
        name = description["cpu"]
        bandwidth = None if native is None else measure_bandwidth(native, BANDWIDTH_ROUNDS).all_threads
        kernels = None if native is None else native.instruction_set
    return MachineFacts(name, description, kernels, bandwidth, get_available_memory(device))


def _measure_gpu_bandwidth(device: torch.device) -> float:
    """Return GB/s of a copy within the GPU's memory: bytes read and written."""
    source = torch.empty(GPU_COPY_BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(BANDWIDTH_ROUNDS):
        target.copy_(source)
    torch.cuda.synchronize(device)
    return GPU_COPY_BYTES * BANDWIDTH_ROUNDS / (time.perf_counter() - start) / 1e9


def examine_target(llm: LLM, quantization: str | None, context: int) -> TargetFacts:
    """Describe the target.

    Args:
        llm: plain decoding.
        quantization: "int8" or "int4" if the weights were rounded while loading.
        context: tokens of a request for the largest batch, cut to the model's context.
    """
    target, reason = llm.target, None
    if not target.runs_native:
        reason = "--no-fused is given" if not llm.fused else explain_unsupported_model(target.model) or "unknown"
    bits = QUANTIZED_BITS[quantization] if quantization else 8 * target.model.dtype.itemsize
    return TargetFacts(
        name=get_model_name(llm),
        architecture=type(target.model).__name__,
        parameters=target.num_parameters,
        dtype=str(target.model.dtype).removeprefix("torch."),
        quantization=quantization,
        context_length=target.context_length,
        vocab_size=target.vocab_size,
        is_native=target.runs_native,
        is_exact=target.is_exact,
        reason=reason,
        weight_bytes=target.num_parameters * bits / 8,
        kv_bytes_per_token=target.bytes_per_token(),
        kv_tokens=(target.pool.capacity or 0) - llm.limits.page_size,  # page 0 holds no tokens
        context=min(context, target.context_length),
    )


def examine_drafter(candidate: Candidate, llm: LLM, builtin: str | None) -> DrafterFacts:
    """Describe a drafter that was loaded.

    Args:
        candidate: the drafter.
        llm: the target with it.
        builtin: name of the built-in target, whose drafters have no folder in their specification.
    """
    spec = NO_DRAFT_SPEC if llm.drafter is None else llm.drafter.spec
    folder = candidate.model or _find_builtin_folder(candidate.method, builtin)
    parameters, dtype, size = _measure_folder(folder)
    return DrafterFacts(
        candidate.label, spec.title or candidate.method, folder, parameters, dtype, size,
        0 if spec.draft_kv is None else spec.draft_kv.bytes_per_token,
        spec.vocabulary, spec.is_native, spec.max_nodes, spec.is_chain,
    )  # fmt: skip


def _find_builtin_folder(name: str, builtin: str | None) -> str | None:
    from foredraft import zoo

    try:
        method, _ = resolve_method(name)
    except ForedraftError:
        return None
    return None if builtin is None else zoo.find_drafter(method.built_in.folders, builtin)


def _measure_folder(folder: str | None) -> tuple[int | None, str | None, int]:
    """Return the numbers in a folder's tensors, their commonest dtype, and the bytes of its files."""
    if folder is None:
        return None, None, 0
    path = Path(find_revision(folder, None))
    counts: dict[str, int] = {}
    for file in sorted(path.glob("*.safetensors")):
        for entry in read_header(file, folder).values():
            counts[entry.dtype] = counts.get(entry.dtype, 0) + 8 * (entry.end - entry.start) // BITS.get(entry.dtype, 8)
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return (sum(counts.values()), max(counts, key=counts.__getitem__), size) if counts else (None, None, size)


def to_json(facts: MachineFacts | TargetFacts | DrafterFacts) -> dict[str, Any]:
    """Return the facts for JSON."""
    values = asdict(facts)
    if isinstance(facts, TargetFacts):
        values["largest_batch"] = facts.largest_batch
    return values
