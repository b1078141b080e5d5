"""What an operator decides, and what a client may ask for at most."""

from dataclasses import dataclass, field

from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class Limits:
    """The most one request may hold; one more is a 4xx before anything is tokenised."""

    n: int = 16
    prompts: int = 64
    samples: int = 256  # prompts * n
    messages: int = 1024
    stops: int = 4
    stop_length: int = 1024  # characters
    logprobs: int = 20
    bias: int = 300
    token_ids: int = 4096  # stop_token_ids, allowed_token_ids, bad_words
    schema: int = 64 << 10  # bytes of a grammar or JSON schema
    text: int = 256 << 10  # characters to tokenise where more than the context may hold is wanted
    body: int = 2 << 20
    headers: int = 64 << 10
    target: int = 8 << 10  # path and query
    depth: int = 64  # of the JSON body
    body_seconds: float = 30.0  # for the whole body to arrive
    header_seconds: float = 10.0  # for the headers of a fresh connection
    stall_seconds: float = 30.0  # a stream nobody reads
    template_seconds: float = 2.0
    template_chars: int = 8 << 20


@dataclass(frozen=True)
class Settings:
    """Of one server."""

    names: tuple[str, ...] = ("foredraft",)  # what clients may call the model; the first is reported
    api_key: str | None = None
    request_timeout: float | None = 600.0  # seconds from arrival to the last token
    drain_timeout: float = 30.0  # seconds a stopping server lets requests go on
    chat_template: str | None = None  # source; None = the tokenizer's own
    has_plain_template: bool = True  # for a model without any; False = such a request is refused
    has_spec_metrics: bool = False  # figures of speculation in every response
    has_vllm_names: bool = True  # metrics also under vLLM's names
    protects_metrics: bool = False  # /metrics and /version need the key too
    has_access_log: bool = False
    is_strict: bool = False  # max_tokens beyond the context is refused; False = as many as fit
    allowed_hosts: tuple[str, ...] | None = None  # names in the Host header, beside localhost; None = any
    keep_alive: float = 10.0  # seconds of silence after which a stream says that it lives
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Raises ForedraftError for a key that no client could send."""
        key = self.api_key
        if key is not None and (not key or key != key.strip() or not (key.isascii() and key.isprintable())):
            raise ForedraftError("the API key must be printable ASCII characters without blanks at either end")
