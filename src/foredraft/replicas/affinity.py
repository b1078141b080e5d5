"""Choice of a replica: of a session its own, of a prompt the one whose KV cache holds its beginning, else the idlest.

A request that names a stored response goes to the replica that has it: the id of a response has a tag, which is a hash
of the replica's address. `ReplicaPool` finds it.

A session is named by a header, or by prompt_cache_key of /v1/responses. Its replica is the one with the highest hash of
(session, replica), so that every front chooses the same, and a replica that comes or goes moves only its own share of
the sessions.

A prompt is divided into blocks. Each block has the hash of the prompt up to its end. The table holds the replicas that
were sent each hash. This is an estimate of their caches: a replica may have evicted the prefix, which costs time only.
"""

import hashlib
import json
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SESSION_HEADER = b"x-session-id"
BLOCK_CHARS = 128  # characters of a block, about two pages of a KV cache
MAX_BLOCKS = 128  # blocks of a prompt that are hashed
MAX_PARSED_BYTES = 256 << 10  # bytes of a body that is parsed; parsing more would delay other streams
MAX_ENTRIES = 1 << 16  # hashes in the table
MAX_HOLDERS = 4  # replicas stored per hash
MIN_MATCH = 0.5  # share of the blocks that a replica must hold
LOAD_FACTOR, LOAD_SLACK = 1.5, 4  # a replica is overloaded with more requests than factor * fewest + slack
_PROMPT_FIELDS = ("messages", "prompt")
_TAG = r"resp_(r[0-9a-f]{8}_)"  # beginning of the id of a response
_PATH_PATTERN = re.compile(rf"/v1/responses/{_TAG}")
# In JSON this can only be a key and its value: the quotes of a string are escaped.
_PREVIOUS_PATTERN = re.compile(rf'"previous_response_id"\s*:\s*"{_TAG}'.encode())


@dataclass(frozen=True)
class AffinityKey:
    """Properties of a request that tie it to a replica."""

    session: str | None = None
    replica_tag: str | None = None  # tag of the replica that has the stored response which the request names
    blocks: tuple[bytes, ...] = ()  # hashes of the prompt up to the end of each block


def make_replica_tag(host: str, port: int) -> str:
    """Make the tag of the responses of a replica from its address."""
    return f"r{hashlib.blake2b(f'{host}:{port}'.encode(), digest_size=4).hexdigest()}_"


def read_affinity_key(headers: Sequence[tuple[bytes, bytes]], body: bytes, path: str = "") -> AffinityKey:
    """Read the key of a request. An invalid body has no blocks: the replica answers it with an error.

    Args:
        headers: names in lower case, and values.
        body: JSON of a request that generates.
        path: of the request. Default "" = one that names no response.
    """
    tag = _read_tag(path, body)
    session = next((value.decode("latin-1") for name, value in headers if name == SESSION_HEADER and value), None)
    if session is not None or not body or len(body) > MAX_PARSED_BYTES:
        return AffinityKey(session, tag)
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return AffinityKey(None, tag)
    if not isinstance(request, dict):
        return AffinityKey(None, tag)
    cache_key = request.get("prompt_cache_key")
    return AffinityKey(cache_key if isinstance(cache_key, str) and cache_key else None, tag, _hash_blocks(request))


def _read_tag(path: str, body: bytes) -> str | None:
    """Read the tag of the response that a request names, without parsing the body, which may be long."""
    if not path.startswith("/v1/responses"):
        return None
    if match := _PATH_PATTERN.match(path):
        return match[1]
    found = _PREVIOUS_PATTERN.search(body)
    return None if found is None else found[1].decode()


def _hash_blocks(request: Mapping[str, Any]) -> tuple[bytes, ...]:
    prompt = next((request[name] for name in _PROMPT_FIELDS if request.get(name)), "")
    if "input" in request:
        prompt = [request.get("instructions"), request["input"]]
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    data = hashlib.blake2b(str(request.get("cache_salt", "")).encode("utf-8", "surrogatepass"), digest_size=8)
    hashes = []
    for start in range(0, min(len(text) // BLOCK_CHARS, MAX_BLOCKS) * BLOCK_CHARS, BLOCK_CHARS):
        data.update(text[start : start + BLOCK_CHARS].encode("utf-8", "surrogatepass"))
        hashes.append(data.digest())
    return tuple(hashes)


@dataclass(frozen=True)
class Choice:
    """A replica, and why it was chosen: "stored", "session", "prefix" or "load"."""

    replica: str
    reason: str


class AffinityRouter:
    """Chooses replicas by session, prefix and load."""

    def __init__(self) -> None:
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()  # hash -> replicas, the latest first
        self._num_chosen: Counter[str] = Counter()

    def choose(self, key: AffinityKey, loads: Mapping[str, int]) -> Choice:
        """Choose a replica and store that it holds the prompt.

        Args:
            key: of the request.
            loads: running requests of each replica that may be chosen; not empty.
        """
        choice = self._find(key, loads)
        self._num_chosen[choice.replica] += 1
        for block in key.blocks:
            others = [name for name in self._holders.pop(block, ()) if name != choice.replica]
            self._holders[block] = (choice.replica, *others[: MAX_HOLDERS - 1])
        while len(self._holders) > MAX_ENTRIES:
            self._holders.popitem(last=False)
        return choice

    def forget(self, replica: str) -> None:
        """Drop a replica that has gone."""
        self._num_chosen.pop(replica, None)
        for block, names in list(self._holders.items()):
            if replica in names:
                self._holders[block] = tuple(name for name in names if name != replica)

    def _find(self, key: AffinityKey, loads: Mapping[str, int]) -> Choice:
        limit = LOAD_FACTOR * min(loads.values()) + LOAD_SLACK
        free = {name: load for name, load in loads.items() if load <= limit}
        if key.session is not None:
            return Choice(max(free, key=lambda name: _hash_pair(str(key.session), name)), "session")
        holders = self._find_holders(key.blocks, free)
        if holders:
            return Choice(self._find_idlest(holders), "prefix")
        return Choice(self._find_idlest(loads), "load")

    def _find_holders(self, blocks: Sequence[bytes], free: Mapping[str, int]) -> dict[str, int]:
        """Return the free replicas that hold the longest part of the prompt, with their loads."""
        for length in range(len(blocks), 0, -1):
            if length < MIN_MATCH * len(blocks):
                break
            found = {name: free[name] for name in self._holders.get(blocks[length - 1], ()) if name in free}
            if found:
                return found
        return {}

    def _find_idlest(self, loads: Mapping[str, int]) -> str:
        """Return the replica with the fewest running requests; of equal ones that which was chosen least."""
        return min(loads, key=lambda name: (loads[name], self._num_chosen[name], name))


def _hash_pair(session: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{replica}\0{session}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
