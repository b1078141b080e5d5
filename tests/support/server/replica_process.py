"""`foredraft serve --replicas` as a process, and the processes of its replicas."""

import json
import threading
import time
from pathlib import Path

import httpx

MODEL_TITLE = "ray::ServeReplica:foredraft:Model"  # Ray's title of the processes of the replicas


def find_replica_processes(server: int) -> list[int]:
    """Return the process ids of the replicas below the process `server`."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            pid, title = int(folder.name), (folder / "cmdline").read_bytes().decode(errors="replace")
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[pid] = title.replace("\0", " ").strip()
        except OSError:
            continue  # it has ended
    return [pid for pid, title in titles.items() if title.startswith(MODEL_TITLE) and is_below(pid, server, parents)]


def is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    """Whether a process was started by another one, or by its children."""
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


class Request(threading.Thread):
    """One stream, read on a thread.

    Args:
        client: of the server.
        body: of the request.
    """

    def __init__(self, client: httpx.Client, body: dict) -> None:
        super().__init__(daemon=True)
        self._client, self.body = client, body
        self.status, self.retry_after, self.events = 0, "", []
        self.start_time, self.first_time = time.perf_counter(), 0.0
        self.start()

    def run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self.body | {"stream": True}) as answer:
            self.retry_after = answer.headers.get("retry-after", "")
            if answer.status_code != 200:
                self.events = [json.loads(answer.read())]
            else:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        self.first_time = self.first_time or time.perf_counter()
                        self.events.append(json.loads(line.removeprefix("data: ")))
            self.status = answer.status_code

    @property
    def error(self) -> dict | None:
        """Error that ended the request."""
        return self.events[-1].get("error") if self.events else None

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events if "choices" in event)

    @property
    def is_complete(self) -> bool:
        return self.error is None and self.events[-1]["choices"][0]["finish_reason"] is not None
