"""Files of a job: results so far, what the job is, and the final name once it is complete.

OUT.part   results, one line each, appended as they come
OUT.job    what the job is; locked while it runs
OUT        OUT.part, renamed at the end: if it exists, it is complete
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from foredraft.errors import ForedraftError
from foredraft.files.disk import convert_write_errors


@dataclass(frozen=True)
class JobKey:
    """Identity of a job: all that its results depend on. A job is resumed only with the same.

    Attributes:
        input_digest: SHA-256 of the file of requests.
        settings: model, fields and seed, as text.
        is_ordered: results are in the order of the lines.
        created: time in the results, in seconds since 1970.
    """

    input_digest: str
    settings: str
    is_ordered: bool
    created: int


class JobFiles:
    """Files of one job. `open` holds the lock; only its holder writes.

    Args:
        out: file of the results once they are complete.
        key: what the results depend on.
    """

    def __init__(self, out: Path, key: JobKey) -> None:
        if not out.name or out.is_dir():
            raise ForedraftError(f"{str(out)!r} is a folder; give a file for the results")
        self.out = out
        self.part = out.with_name(f"{out.name}.part")
        self.job = out.with_name(f"{out.name}.job")
        self.key = key
        self.done: set[str] = set()  # custom_id of every result that the part holds
        self._fd = -1

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the part for appending, with the results of an interrupted run in `done`.

        Raises:
            ForedraftError: the results exist, another process writes them, or they are of another job.
        """
        with convert_write_errors(self.out.parent, "make room or give another file, and the same command goes on"):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.job, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._lock(lock)
                self._check_key(lock)
                self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
                self._read_part()
                yield
            finally:
                if self._fd >= 0:
                    os.close(self._fd)
                os.close(lock)

    def append(self, data: bytes) -> None:
        """Append one result. After kill -9 the file holds it, or a beginning of it that `open` removes."""
        while data:
            data = data[os.write(self._fd, data) :]

    def finish(self) -> None:
        """Give the results their final name."""
        os.fsync(self._fd)
        os.replace(self.part, self.out)
        self.job.unlink(missing_ok=True)

    def _lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ForedraftError(f"another process writes {self.out}; wait for it, or give another file") from None

    def _check_key(self, lock: int) -> None:
        """Compare the job with that of an interrupted run, or write down what it is."""
        text = os.read(lock, 1 << 20).decode(errors="replace")
        expected = json.dumps(asdict(self.key), indent=1) + "\n"
        if not self.part.exists() or not text:
            if self.out.exists():
                self.job.unlink(missing_ok=True)
                raise ForedraftError(f"{self.out} exists and is complete; delete it, or give another file")
            os.ftruncate(lock, 0)
            os.pwrite(lock, expected.encode(), 0)
            self.part.unlink(missing_ok=True)
        elif text != expected:
            raise ForedraftError(
                f"{self.part} holds results of {self._find_difference(text)}; repeat that command to go on, or delete "
                f"{self.part.name} to begin anew"
            )

    def _find_difference(self, text: str) -> str:
        """Name the part of the key in which an interrupted run differs."""
        names = {"input_digest": "another input", "is_ordered": "the other order", "created": "another input"}
        try:
            other = json.loads(text)
            differing = [name for name, value in asdict(self.key).items() if other.get(name) != value]
        except (ValueError, AttributeError):
            differing = []
        return names.get(differing[0], "other options") if differing else "another job"

    def _read_part(self) -> None:
        """Read the results of an interrupted run, and cut off a last line that is not whole."""
        end = 0
        with open(self._fd, "rb", closefd=False) as source:
            for data in source:
                if not data.endswith(b"\n"):
                    break
                self.done.add(self._read_id(data))
                end += len(data)
        os.ftruncate(self._fd, end)

    def _read_id(self, data: bytes) -> str:
        try:
            return str(json.loads(data)["custom_id"])
        except (ValueError, TypeError, KeyError):
            raise ForedraftError(f"{self.part} is damaged; delete it to begin anew") from None
