"""Stored responses of one server, in memory, with bounds on their number and bytes."""

from collections import OrderedDict

from foredraft.server.responses_api.stored_response import StoredResponse


class ResponseStore:
    """Responses by owner and id; the least recently used leave first. One event loop uses it.

    A response that has left keeps its bytes while a listed one continues it, so that no conversation has a gap. They
    count until the last one has left.

    Args:
        max_responses: listed responses. 0 = nothing is stored.
        max_bytes: bytes of all responses, those that only others need included.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self.num_bytes = 0
        self.num_evicted = 0  # responses that left to make room
        self._listed: OrderedDict[tuple[bytes, str], StoredResponse] = OrderedDict()  # the latest used is last
        self._num_users: dict[StoredResponse, int] = {}  # 1 if it is listed, and 1 for each child in this dict

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def is_enabled(self) -> bool:
        return self.max_responses > 0

    def add(self, response: StoredResponse) -> None:
        """Store a response. One of the same owner and id is replaced."""
        self.delete(response.owner, response.id)
        self._listed[response.owner, response.id] = response
        self._add_user(response)
        while len(self._listed) > self.max_responses or self.num_bytes > self.max_bytes:
            _, oldest = self._listed.popitem(last=False)
            self._remove_user(oldest)
            self.num_evicted += 1

    def find(self, owner: bytes, name: str) -> StoredResponse | None:
        """Return a response, which becomes the latest used; None if it is not listed."""
        response = self._listed.get((owner, name))
        if response is not None:
            self._listed.move_to_end((owner, name))
        return response

    def delete(self, owner: bytes, name: str) -> bool:
        """Remove a response. Returns whether it was listed."""
        response = self._listed.pop((owner, name), None)
        if response is not None:
            self._remove_user(response)
        return response is not None

    def _add_user(self, response: StoredResponse) -> None:
        node: StoredResponse | None = response
        while node is not None:
            self._num_users[node] = self._num_users.get(node, 0) + 1
            if self._num_users[node] > 1:
                break
            self.num_bytes += node.num_bytes
            node = node.parent

    def _remove_user(self, response: StoredResponse) -> None:
        node: StoredResponse | None = response
        while node is not None:
            self._num_users[node] -= 1
            if self._num_users[node]:
                break
            del self._num_users[node]
            self.num_bytes -= node.num_bytes
            node = node.parent
