"""About 150 damaged folders: each loads and decodes as the undamaged one does, or is refused in one line that names it.

No other exception, no endless wait, and no allocation of a size that a damaged number gives.
"""

import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, Sampling
from foredraft.drafters.checkpoint_folders import read
from foredraft.errors import ForedraftError
from tests.support import damaged_folders, tiny_models
from tests.support.checkpoints import published_folders

TARGETS = damaged_folders.list_target_damage()
MAKERS: dict[str, Callable[..., Path]] = {
    "eagle3": published_folders.eagle3,
    "mlp_speculator": published_folders.mlp_speculator,
    "medusa": published_folders.medusa,
}
FILES = {"eagle3": "model.safetensors", "mlp_speculator": "model.safetensors", "medusa": "medusa_lm_head.pt"}
DRAFTERS = [(kind, what) for kind, file in FILES.items() for what in damaged_folders.list_drafter_damage(file)]
MOST_SECONDS = 30  # a hang, not a measurement
MOST_MEMORY = 1 << 30  # bytes beyond what the process held


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Turn a hang, or too much memory, into an error."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError("it waits for ever")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MOST_SECONDS)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024 < MOST_MEMORY


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "llama"
    tiny_models.llama(vocab_size=320).float().save_pretrained(folder)
    tiny_models.tokenizer().save_pretrained(folder)
    return folder


def decode(folder: Path) -> tuple[list[int], str]:
    llm = LLM(str(folder), None)
    [completion] = llm.generate([[40, 50, 60]], Sampling(max_tokens=6, temperature=0))
    return list(completion.token_ids), llm.tokenizer.decode([70, 71, 72])


def read_all(folder: Path) -> tuple[Any, dict[str, list[Any]]]:
    """Read a drafter's shape and tensors into new memory: tensors that are read lie over the file's pages."""
    held = read(folder, published_folders.TARGET)
    return held.shape, {name: tensor.flatten().tolist() for name, tensor in held.tensors.items()}


@pytest.fixture(scope="module")
def undamaged(good: Path) -> tuple[list[int], str]:
    return decode(good)


def try_folder(what: Callable[[Path], Any], folder: Path) -> Any:
    """Apply `what` to a folder; None if it is refused in one line that names the folder. Other exceptions pass."""
    try:
        return what(folder)
    except ForedraftError as error:
        text = str(error)
    assert "\n" not in text
    assert str(folder) in text
    return None


@pytest.mark.parametrize("what", TARGETS)
def test_a_damaged_target_decodes_as_before_or_is_refused(
    what: str, good: Path, undamaged: tuple[list[int], str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    TARGETS[what](folder)
    assert try_folder(decode, folder) in (None, undamaged)


@pytest.mark.parametrize(("kind", "what"), DRAFTERS)
def test_a_damaged_drafter_reads_as_before_or_is_refused(
    kind: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = MAKERS[kind](tmp_path / "head")
    whole = read_all(folder)
    damaged_folders.list_drafter_damage(FILES[kind])[what](folder)
    assert try_folder(read_all, folder) in (None, whole)
    assert not (tmp_path / "exploded").exists()


def test_the_damage_is_seen(good: Path, tmp_path: Path) -> None:
    # anti-vacuity: nearly all of it is refused, and the undamaged folder is not
    refused = 0
    for i, damage in enumerate(damaged_folders.list_drafter_damage("model.safetensors").values()):
        folder = published_folders.eagle3(tmp_path / str(i))
        damage(folder)
        refused += try_folder(read_all, folder) is None
    assert refused >= i  # one damage is none here: the first tensor is I64 already
    assert decode(good)
