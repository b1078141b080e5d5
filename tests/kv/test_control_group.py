"""Memory limits of control groups, in folders as the kernel shows them."""

import pytest
import torch

from foredraft.kv import sizing
from foredraft.kv.control_group import read_memory_room

GIB = 1 << 30


@pytest.fixture
def mount(tmp_path):
    """A file system of control groups with a service inside a slice."""
    (tmp_path / "fs" / "a.slice" / "b.service").mkdir(parents=True)
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n0::/a.slice/b.service\n")
    return tmp_path / "fs"


def write_group(folder, limit, used, inactive=0):
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 7\n")


def read_room(mount):
    return read_memory_room(mount, mount.parent / "cgroup")


def test_the_tightest_limit_counts(mount):
    write_group(mount / "a.slice" / "b.service", 4 * GIB, GIB, inactive=GIB // 2)
    assert read_room(mount) == 3 * GIB + GIB // 2
    write_group(mount / "a.slice", 3 * GIB, 2 * GIB)
    assert read_room(mount) == GIB
    write_group(mount / "a.slice", 3 * GIB, 4 * GIB)
    assert read_room(mount) == 0


def test_a_container_sees_its_own_group_as_the_root(mount):
    (mount.parent / "cgroup").write_text("0::/\n")
    write_group(mount, 2 * GIB, GIB)
    assert read_room(mount) == GIB


def test_no_limit_is_none(mount):
    assert read_room(mount) is None, "no files, as in the root group of a machine"
    write_group(mount / "a.slice" / "b.service", "max", GIB)
    assert read_room(mount) is None
    (mount.parent / "cgroup").write_text("4:memory:/x\n")
    assert read_room(mount) is None, "cgroup v1"
    assert read_memory_room(mount, mount.parent / "absent") is None


def test_the_free_memory_of_a_processor_is_bounded_by_the_limit(monkeypatch):
    """Fault: the KV cache took a quarter of the machine's memory in a container with a lower limit."""
    monkeypatch.setattr(sizing, "read_memory_room", lambda: 12345)
    assert sizing.get_available_memory(torch.device("cpu")) == 12345
    monkeypatch.setattr(sizing, "read_memory_room", lambda: None)
    assert sizing.get_available_memory(torch.device("cpu")) > 12345
