"""Health check of the image: exit code 0 if the server answers `GET /health` with status 200, else 1.

It opens no connection through a proxy, whatever the environment of the container says.
"""

import http.client
import sys

PORT = 8000  # of the image's entry point
TIMEOUT = 4  # seconds; less than that of HEALTHCHECK


def is_healthy(port: int = PORT) -> bool:
    """Return whether the server on this machine reports that its engine makes progress."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_healthy() else 1)
