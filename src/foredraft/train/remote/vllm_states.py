"""Files of hidden states that vLLM's ExampleHiddenStatesConnector writes: read once, then deleted.

vLLM deletes no file. It holds a lock on PATH.lock until PATH is complete.
"""

import fcntl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from foredraft.errors import ForedraftError

STATES, TOKEN_IDS = "hidden_states", "token_ids"  # names of the tensors
WAITS = (0.1, 0.2, 0.5, 1, 2, 5)  # seconds, for a file without a lock that is not complete yet


@dataclass(frozen=True)
class HiddenStates:
    """States of one row of tokens."""

    states: Tensor  # [T, L, H], of L layer boundaries in ascending order
    token_ids: tuple[int, ...]  # T


def take_states(path: str, sleep: Callable[[float], None] = time.sleep) -> HiddenStates:
    """Read a file of states and delete it.

    Args:
        path: path in vLLM's response, which must be the same on this machine.
        sleep: waits some seconds. Default: `time.sleep`.

    Raises:
        ForedraftError: the file cannot be read, is no file of states, or cannot be deleted.
    """
    data = _read(Path(path), sleep)
    delete_states(path)
    try:
        tensors = load(data)
        return HiddenStates(tensors[STATES], tuple(tensors[TOKEN_IDS].tolist()))
    except (SafetensorError, KeyError) as error:
        raise ForedraftError(f"{path} holds no hidden states ({error}); see the log of vLLM") from None


def delete_states(path: str) -> None:
    """Delete a file of states and its lock, once vLLM has written it. Raises ForedraftError if that is impossible."""
    try:
        _wait_for_writer(Path(path))
        Path(path).unlink(missing_ok=True)
        _get_lock(Path(path)).unlink(missing_ok=True)
    except OSError as error:
        raise ForedraftError(
            f"{path} cannot be deleted ({error.strerror}), and the folder would fill up; run the trainer as the user "
            f"of vLLM, or let it write to {Path(path).parent}"
        ) from None


def _read(file: Path, sleep: Callable[[float], None]) -> bytes:
    """Read a complete file. Files without a lock are read again while they are incomplete."""
    for seconds in (*WAITS, None):
        try:
            is_locked = _wait_for_writer(file)
            data = file.read_bytes()
            if is_locked or _is_complete(data):
                return data
        except OSError as error:
            if not isinstance(error, FileNotFoundError) or not file.parent.is_dir():
                raise _refuse(file, error) from None
        if seconds is not None:
            sleep(seconds)
    raise _refuse(file, FileNotFoundError(2, "no complete file"))


def _wait_for_writer(file: Path) -> bool:
    """Wait until vLLM has written the file; return whether it has a lock, which vLLM can be started without."""
    try:
        with _get_lock(file).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            return True
    except FileNotFoundError:
        return False


def _is_complete(data: bytes) -> bool:
    try:
        load(data)
        return True
    except SafetensorError:
        return False


def _get_lock(file: Path) -> Path:
    return file.with_name(f"{file.name}.lock")


def _refuse(file: Path, error: OSError) -> ForedraftError:
    return ForedraftError(
        f"{file}, which vLLM wrote, cannot be read here ({error.strerror}): its folder must be on this machine under "
        "the same path, and readable; start vLLM here, or mount the folder, and the same command goes on"
    )
