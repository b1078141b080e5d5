"""Output of the server's access log."""

import logging


def enable_access_log() -> None:
    """Log each request as one line on standard error, without level and logger name."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access = logging.getLogger("foredraft.access")
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    access.propagate = False
