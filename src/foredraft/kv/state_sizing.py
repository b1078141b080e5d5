"""Sizes of the memory of recurrent states: requests that run at once, and states that the prefix cache keeps."""

from dataclasses import dataclass

# States of a request beside those of its draft nodes: after its computed tokens, and after the root of its draft.
STATES_PER_REQUEST = 2
STATE_SHARE = 0.5  # of the KV memory, for states; the rest is for keys and values
PAGE_END_SHARE = 0.5  # of the states' memory, for states that the prefix cache keeps
MAX_PAGE_ENDS_PER_REQUEST = 8  # of them, per request that may run
MIN_PAGE_ENDS = 2  # of them; the samples of one prompt share states after its last pages


@dataclass(frozen=True)
class StatePlan:
    """Limits of the recurrent states of target and drafter."""

    max_batch: int  # requests per step
    max_page_ends: int  # states that the prefix cache keeps
    num_states: int  # states of the cache and of all requests
    num_bytes: int  # memory of these states

    @classmethod
    def make(cls, bytes_per_state: int, memory: int, max_batch: int, max_nodes: int) -> "StatePlan":
        """Divide the memory. At least one request can run, even if its states exceed their share.

        Args:
            bytes_per_state: bytes of one state of the target and one of the drafter; 0 = no recurrent layers.
            memory: memory of KV and states in bytes.
            max_batch: requests per step that the user allows.
            max_nodes: draft nodes of a request at most.
        """
        if not bytes_per_state:
            return cls(max_batch, 0, 0, 0)
        share, per_request = int(memory * STATE_SHARE), max_nodes + STATES_PER_REQUEST
        page_ends = min(int(share * PAGE_END_SHARE) // bytes_per_state, MAX_PAGE_ENDS_PER_REQUEST * max_batch)
        page_ends = max(page_ends, MIN_PAGE_ENDS)
        batch = max(min((share // bytes_per_state - page_ends) // per_request, max_batch), 1)
        num_states = page_ends + batch * per_request
        return cls(batch, page_ends, num_states, num_states * bytes_per_state)
