"""Memory limits of the control groups (cgroup v2) of this process: those of a container or a systemd unit."""

from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
V2_PREFIX = "0::/"


def read_memory_room(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return the bytes that this process may still allocate; None without a limit or without cgroup v2.

    Args:
        mount: file system of the control groups. In a container it begins at the container's own group.
        membership: file that names the group of this process.
    """
    rooms = [_read_group_room(group) for group in _list_groups(mount, membership)]
    return min((room for room in rooms if room is not None), default=None)


def _list_groups(mount: Path, membership: Path) -> list[Path]:
    """Return the folders of the group and of those around it: each of them may have a limit."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith(V2_PREFIX):
            group = mount / line.removeprefix(V2_PREFIX)
            return [folder for folder in (group, *group.parents) if folder.is_relative_to(mount)]
    return []


def _read_group_room(group: Path) -> int | None:
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):  # no limit here, as in the root group
        return None
    if not limit.isdecimal():  # "max"
        return None
    reclaimable = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file ")), 0)
    return max(int(limit) - used + reclaimable, 0)
