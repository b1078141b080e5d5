"""Files of hidden states: complete ones only, deleted once read, and errors with the fix."""

import fcntl
import os
import threading
import time

import pytest
import torch
from safetensors.torch import save

from foredraft.errors import ForedraftError
from foredraft.train.remote.vllm_states import WAITS, delete_states, take_states

DATA = save({"hidden_states": torch.ones(2, 1, 3), "token_ids": torch.tensor([4, 5])})


def test_a_file_is_read_when_its_lock_is_free_and_then_deleted(tmp_path):
    path, lock = tmp_path / "a.safetensors", (tmp_path / "a.safetensors.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def write():
        path.write_bytes(DATA[:-4])
        time.sleep(0.05)
        path.write_bytes(DATA)
        lock.close()

    thread = threading.Thread(target=write)
    thread.start()
    taken = take_states(str(path), pytest.fail)
    thread.join()
    assert taken.token_ids == (4, 5)
    assert torch.equal(taken.states, torch.ones(2, 1, 3))
    assert not list(tmp_path.iterdir())


def test_a_file_without_a_lock_is_read_again_until_it_is_complete(tmp_path):
    path, waits = tmp_path / "a.safetensors", []

    def sleep(seconds):
        waits.append(seconds)
        path.write_bytes(DATA[:-4] if len(waits) == 1 else DATA)

    assert take_states(str(path), sleep).token_ids == (4, 5)
    assert waits == list(WAITS[:2])


def test_a_folder_that_is_elsewhere_is_named_with_the_fix(tmp_path):
    with pytest.raises(ForedraftError, match=r"cannot be read here .* under the same path"):
        take_states(str(tmp_path / "absent" / "a.safetensors"), pytest.fail)
    waits = []
    with pytest.raises(ForedraftError, match=r"cannot be read here \(no complete file\)"):
        take_states(str(tmp_path / "a.safetensors"), waits.append)
    assert waits == list(WAITS)


def test_another_file_is_no_states(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(save({"x": torch.ones(1)}))
    with pytest.raises(ForedraftError, match="holds no hidden states"):
        take_states(str(tmp_path / "a.safetensors"), pytest.fail)


def test_a_file_that_cannot_be_deleted_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.safetensors").write_bytes(DATA)

    def refuse(self, missing_ok=False):
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with pytest.raises(ForedraftError, match=r"cannot be deleted \(Permission denied\), and the folder would fill up"):
        delete_states(str(tmp_path / "a.safetensors"))
