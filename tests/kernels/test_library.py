"""The native library: found or not, chosen by name, stale, built without a compiler or with a broken one."""

import ctypes
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf

from foredraft import LLM, ForedraftError, Sampling
from foredraft.kernels.arena import Arena
from foredraft.kernels.attention import attend
from foredraft.kernels.cpu import build, openmp
from foredraft.kernels.cpu import library as module
from foredraft.kernels.cpu.library import INSTRUCTION_SETS, KERNELS_VARIABLE, NativeLibrary, load_library
from foredraft.kernels.cpu.records import RECORDS, WeightRecord
from foredraft.kernels.linear import PackedWeight, linear, linear_reference
from foredraft.kernels.rows import PackedRows
from foredraft.models.forward_batch import Span
from foredraft.models.hf import HFModel
from foredraft.models.native.decoder import explain_unsupported
from tests.support.families import TINY
from tests.support.library_setups import NATIVE, make_normal

GREEDY = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9], list(range(10, 60))]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Found anew by the test, and anew after it."""
    load_library.cache_clear()
    yield
    load_library.cache_clear()
    if build.LIBRARY.exists():
        load_library()


def tiny() -> hf.LlamaForCausalLM:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TINY | {"hidden_size": 64})).eval()


def texts(llm: LLM) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulate an installation without a compiler."""
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "_foredraft.so")


@NATIVE
def test_without_the_library_the_text_is_the_same_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    fused = LLM(tiny(), None, fused=True)
    assert fused.target.fused is not None
    expected = texts(fused)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "_foredraft.so")
    load_library.cache_clear()
    with pytest.warns(UserWarning, match=r"run: python -m foredraft\.kernels\.cpu\.build"):
        plain = LLM(tiny(), None, fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        others = [LLM(tiny(), None, fused=True), plain.with_drafter("ngram", 3)]
        assert load_library() is None
    assert plain.target.fused is None
    assert not plain.target.pool.is_native
    assert all(texts(llm) == expected for llm in (plain, *others))


@pytest.mark.usefixtures("missing")
@pytest.mark.filterwarnings("ignore:Foredraft was installed without")
def test_without_the_library_what_needs_it_says_how_to_get_it() -> None:
    weight = PackedWeight.pack(torch.ones(2, 4), None, Arena())
    with pytest.raises(ForedraftError, match=r"not installed; run: python -m foredraft\.kernels\.cpu\.build"):
        linear(torch.ones(1, 4), weight)
    keys, rows = torch.zeros(16, 1, 16), PackedRows.pack([Span([1], 0, [7], [0])], [0], 4)
    with pytest.raises(ForedraftError, match=r"not installed; run: python -m foredraft\.kernels\.cpu\.build"):
        attend(keys[:1], keys, keys, rows, 1.0)
    assert explain_unsupported(tiny()) == "no native kernels"


def test_switched_off_it_is_not_loaded_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_library() is None
        llm = LLM(tiny(), None, fused=True)
    assert (llm.target.fused, llm.target.pool.is_native) == (None, False)
    assert len(texts(llm)) == 3


@NATIVE
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_an_instruction_set_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "")
    best = load_library()
    assert best is not None
    if not best.is_supported(name):
        pytest.skip(f"this processor has no {name}")
    monkeypatch.setenv(KERNELS_VARIABLE, name)
    load_library.cache_clear()
    chosen = load_library()
    assert chosen is not None
    assert chosen.instruction_set == name
    chosen.select()
    slow = {"avx512bf16"} if "GenuineIntel" in Path("/proc/cpuinfo").read_text() else set()
    assert chosen.instruction_set == next(
        one for one in INSTRUCTION_SETS if chosen.is_supported(one) and one not in slow
    )


@NATIVE
def test_the_scratch_of_a_product_is_that_of_its_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever set is selected: a set that keeps inputs as floats needs twice the bytes of one that rounds them."""
    monkeypatch.setenv(KERNELS_VARIABLE, "")
    library = load_library()
    assert library is not None
    weight = WeightRecord(None, None, None, 96, 352)
    sizes = {}
    for name in filter(library.is_supported, INSTRUCTION_SETS):
        library.select(name)
        sizes[name] = library.handle.fd_linear_scratch(weight, 9)
    for selected in sizes:
        library.select(selected)
        assert {name: library.handle.fd_linear_scratch_with(name.encode(), weight, 9) for name in sizes} == sizes
    library.select()
    assert library.handle.fd_linear_scratch_with(b"none", weight, 9) == -1


@NATIVE
def test_an_instruction_set_that_is_none_is_refused_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was selected before stays so."""
    monkeypatch.setenv(KERNELS_VARIABLE, "nonsense")
    message = (
        "no 'nonsense' kernels; use one of amx, avx512bf16, avx512vnni, avx512, avx2, portable that it has, or torch"
    )
    with pytest.raises(ForedraftError, match=message) as caught:
        LLM(tiny(), None, fused=True)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv(KERNELS_VARIABLE, "")
    native = load_library()
    assert native is not None
    assert not native.is_supported("nonsense")
    before = native.instruction_set
    with pytest.raises(ForedraftError):
        native.select("avx1024")
    assert native.instruction_set == before


@NATIVE
def test_a_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records may lie otherwise: to call it would be to read memory at random."""
    monkeypatch.setenv(KERNELS_VARIABLE, "")
    monkeypatch.setattr(build, "compute_fingerprint", lambda: "0123456789abcdef")
    with pytest.raises(ForedraftError, match=r"other sources; run: python -m foredraft\.kernels\.cpu\.build") as caught:
        load_library()
    assert "\n" not in str(caught.value)


@NATIVE
@pytest.mark.parametrize("source", ["int other;", 'const char *fd_fingerprint(void) { return "of before"; }'])
def test_a_library_that_lacks_functions_is_refused(tmp_path: Path, source: str) -> None:
    """Fault: after functions were renamed, a library that was not rebuilt ended in an AttributeError."""
    file, library = tmp_path / "old.c", tmp_path / "old.so"
    file.write_text(source)
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("there is no C compiler here")
    subprocess.run([*compiler, "-shared", "-fPIC", str(file), "-o", str(library)], check=True)
    with pytest.raises(ForedraftError, match=r"other sources; run: python -m foredraft\.kernels\.cpu\.build"):
        module._open_library(library)


class Longer(ctypes.Structure):
    _fields_ = (("one_more", ctypes.c_int64 * 99),)


@NATIVE
@pytest.mark.parametrize("which", range(len(RECORDS)), ids=[record.__name__ for record in RECORDS])
def test_a_record_of_another_size_is_noticed(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    records = [*RECORDS]
    records[which] = Longer  # type: ignore[call-overload]
    monkeypatch.setattr(module, "RECORDS", tuple(records))
    with pytest.raises(ForedraftError, match="other sources"):
        load_library()


def test_the_fingerprint_is_of_every_source(tmp_path: Path) -> None:
    for file in [*build.HERE.glob("*.c"), *build.HERE.glob("*.h")]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = build.compute_fingerprint(tmp_path)
    for file in sorted(tmp_path.iterdir()):
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        assert build.compute_fingerprint(tmp_path) != whole, file.name
        file.write_bytes(before)
    assert build.compute_fingerprint(tmp_path) == whole


def test_a_compiler_that_exists_is_preferred_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("gcc", "clang", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "mine -m64")
    assert build.find_compiler() == ["mine", "-m64"]
    monkeypatch.setenv("CC", "/nonexistent")
    assert build.find_compiler() == ["gcc"]
    monkeypatch.delenv("CC")
    (tmp_path / "gcc").unlink()
    assert build.find_compiler() == ["clang"]


def test_without_a_compiler_the_build_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "/nonexistent")
    with pytest.raises(RuntimeError, match="no C compiler was found; install gcc or clang, or set CC"):
        build.build(tmp_path / "_foredraft.so")
    assert not list(tmp_path.iterdir())
    assert build.main() == 1
    assert capsys.readouterr().err.startswith("error: no C compiler was found")


BROKEN = {
    "in words": ("echo 'isa.c:1: error: unknown type' >&2; exit 1", "isa.c:1: error: unknown type"),
    "in silence": ("exit 3", "exit status 3"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_compiler_that_fails_is_quoted_and_the_library_of_before_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    script, words = BROKEN[how]
    broken, out = tmp_path / "cc", tmp_path / "_foredraft.so"
    broken.write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    out.write_text("of before")
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(RuntimeError, match=words) as caught:
        build.build(out)
    assert str(broken) in str(caught.value).splitlines()[0]
    assert out.read_text() == "of before"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library as another kind of processor does: without the instruction sets of this one."""
    if build.find_compiler() is None:
        pytest.skip("no C compiler here")
    out = tmp_path_factory.mktemp("built") / "_foredraft.so"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build.platform, "machine", lambda: "riscv64")
        patch.setattr(build, "COMMON_FLAGS", ["-O1" if flag == "-O3" else flag for flag in build.COMMON_FLAGS])
        build.build(out)
    return out


def test_another_kind_of_processor_has_portable_kernels(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", elsewhere)
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    native = load_library()
    assert native is not None
    assert native.instruction_set == "portable"
    assert [name for name in INSTRUCTION_SETS if native.is_supported(name)] == ["portable"]
    for dtype in (torch.bfloat16, torch.float32):
        weight = PackedWeight.pack(make_normal(70, 33, seed=0, dtype=dtype), None, Arena())
        x = make_normal(7, 33, seed=1)
        torch.testing.assert_close(linear(x, weight), linear_reference(x, weight), rtol=0, atol=1e-4)
    assert len(texts(LLM(tiny(), None, fused=True))) == 3


def test_an_openmp_that_is_not_there_leaves_the_pool_of_our_own(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """clang's runtime has another name, and a torch without OpenMP has none."""
    monkeypatch.setattr(build, "LIBRARY", elsewhere)
    monkeypatch.setattr(openmp, "_find_openmp", lambda: None)
    native = load_library()
    assert native is not None
    native.handle.fd_use_openmp(None, None)  # the process may have loaded this file before
    weight, x = PackedWeight.pack(make_normal(300, 33, seed=0), None, Arena()), make_normal(7, 33, seed=1)
    alone = linear(x, weight)
    torch.set_num_threads(2)
    try:
        assert all(torch.equal(linear(x, weight), alone) for _ in range(20))
    finally:
        torch.set_num_threads(1)


@NATIVE
def test_a_model_adopted_plain_keeps_torchs_attention() -> None:
    """fused=False is the way back to torch's own operators, all of them."""
    lm = HFModel.wrap_model(tiny(), "tiny", is_fused=False)
    assert (lm.fused, lm.pool.is_native) == (None, False)


@NATIVE
def test_the_library_is_loaded_once() -> None:
    first = load_library()
    assert isinstance(first, NativeLibrary)
    assert load_library() is first
