"""Recovery of transcripts after a step that raised: each goes back to its last delta."""

import logging

from foredraft.engine.transcript import Transcript
from foredraft.request import Request

log = logging.getLogger(__name__)


def settle_deltas(transcripts: dict[Request, Transcript]) -> dict[Request, int]:
    """Mark the tokens of queued deltas as final, and drop the transcripts that have ended.

    Args:
        transcripts: transcript of every request. Those that have their last delta are deleted.

    Returns:
        Number of final tokens of every other request.
    """
    for request, transcript in list(transcripts.items()):
        # `Transcript.emit` queues a delta and then calls `mark_emitted`. It may have been interrupted in between.
        transcript.mark_emitted()
        if transcript.has_final_delta:  # the request ended, and the step raised before removing it
            del transcripts[request]
    return {request: transcript.num_emitted for request, transcript in transcripts.items()}


def rewind_output(transcript: Transcript) -> bool:
    """Rewind a transcript and the grammar of its request. Returns False if the text could not be rebuilt.

    The request's output must be cut to its final tokens before.
    """
    matcher = transcript.request.matcher  # of the request's grammar
    if matcher is not None:
        matcher.restart()
    try:
        transcript.rewind()
    except Exception:
        log.exception("the text of a request could not be rebuilt; the request ends")
        return False
    return True
