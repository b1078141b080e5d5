"""Threads that prepare requests: rendering, tokenization and image encoding."""

from concurrent.futures import ThreadPoolExecutor

NUM_THREADS = 2  # tokenizers release the interpreter's lock, so that one long prompt does not delay the others
NUM_IMAGE_THREADS = 2  # one request is encoded while the images of the next are read


class PreparationThreads:
    """Threads of one service. Requests with images have their own: large images take seconds."""

    def __init__(self) -> None:
        self.text = ThreadPoolExecutor(NUM_THREADS, "foredraft-prepare")
        self.images = ThreadPoolExecutor(NUM_IMAGE_THREADS, "foredraft-images")

    def choose(self, has_images: bool) -> ThreadPoolExecutor:
        """Return the threads of a request."""
        return self.images if has_images else self.text

    def close(self) -> None:
        """End the threads after their present work, and drop the rest."""
        self.text.shutdown(wait=False, cancel_futures=True)
        self.images.shutdown(wait=False, cancel_futures=True)
