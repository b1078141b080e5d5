"""Settings of a server, and limits on the requests of its clients."""

from dataclasses import dataclass, field

from foredraft.errors import ForedraftError
from foredraft.image_files import ImageLimits

BODY_BYTES = 2 << 20  # of a request without images
MAX_BODY_BYTES = 64 << 20  # of a request with any number of images


@dataclass(frozen=True)
class RequestLimits:
    """Maximum sizes and times of one request. A request above one of them gets a 4xx status before tokenization."""

    max_n: int = 16  # samples per prompt
    max_prompts: int = 64  # prompts of a completion request
    max_samples: int = 256  # prompts * n
    max_messages: int = 1024  # messages of a chat request
    max_tools: int = 128  # tools of a chat request
    max_tools_bytes: int = 256 << 10  # bytes of their definitions; also of chat_template_kwargs
    max_stops: int = 4  # stop strings
    max_stop_chars: int = 1024  # characters of a stop string or bad word
    max_logprobs: int = 20  # likeliest tokens listed per position
    max_logit_bias: int = 300  # entries of logit_bias; also of bad_words
    max_token_ids: int = 4096  # entries of stop_token_ids and of allowed_token_ids
    max_schema_bytes: int = 64 << 10  # bytes of a grammar or JSON schema
    max_text_chars: int = 256 << 10  # characters of a text that may exceed the context, as its tokens are truncated
    max_body_bytes: int = BODY_BYTES  # bytes
    max_header_bytes: int = 64 << 10  # bytes of all headers together
    max_target_bytes: int = 8 << 10  # bytes of path and query
    max_depth: int = 64  # nesting depth of the JSON body
    body_timeout: float = 30.0  # seconds until the whole body must have arrived
    header_timeout: float = 10.0  # seconds until the headers must have arrived
    stall_timeout: float = 30.0  # seconds until a stream that the client does not read ends
    template_timeout: float = 2.0  # seconds of rendering a chat template
    max_template_chars: int = 8 << 20  # characters of a rendered chat


def make_request_limits(max_images: int) -> RequestLimits:
    """Return the limits of requests with some images each: a body may hold them in base64, up to MAX_BODY_BYTES.

    Args:
        max_images: images of a request at most.
    """
    bytes_per_image = ImageLimits.max_bytes * 4 // 3 + 1024
    return RequestLimits(max_body_bytes=min(BODY_BYTES + max_images * bytes_per_image, MAX_BODY_BYTES))


@dataclass(frozen=True)
class ServerSettings:
    """Settings of one server."""

    model_names: tuple[str, ...] = ("foredraft",)  # names of the model in requests; responses report the first
    api_key: str | None = None  # None = no key is required
    admin_key: str | None = None  # key of the routes that load and unload models; None = there are no such routes
    request_timeout: float | None = 600.0  # seconds from arrival to the last token; None = no limit
    drain_timeout: float = 30.0  # seconds that running requests may take during a shutdown
    chat_template: str | None = None  # Jinja source; None = the tokenizer's template
    has_plain_template: bool = True  # use a plain template for a model without one; False = refuse chat requests
    tool_call_parser: str = "auto"  # format of tool calls; "auto" = by the chat template
    reasoning_parser: str = "auto"  # format of reasoning; "auto" = by the chat template, "none" = answers have none
    has_spec_metrics: bool = False  # report speculative statistics in every response
    stored_responses: int = 1024  # responses of /v1/responses that are stored; 0 = none
    stored_response_bytes: int = 64 << 20  # bytes of all stored responses
    media_folder: str | None = None  # folder whose files requests may name in file URLs; None = none
    has_traces: bool = False  # serve hidden states and distributions, for training on another machine
    has_vllm_names: bool = True  # report metrics also under vLLM's names
    protects_metrics: bool = False  # require the API key for /metrics and /version too
    has_access_log: bool = False
    has_strict_max_tokens: bool = False  # refuse max_tokens beyond the context; False = generate as many as fit
    allowed_hosts: tuple[str, ...] | None = None  # names accepted in the Host header beside localhost; None = any
    keep_alive_seconds: float = 10.0  # seconds without an event, after which a stream sends a comment
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        """Raise ForedraftError for a key that cannot be sent in a header, or two keys that are equal."""
        for name, key in (("API", self.api_key), ("admin", self.admin_key)):
            if key is not None and (not key or key != key.strip() or not (key.isascii() and key.isprintable())):
                raise ForedraftError(f"the {name} key must be printable ASCII characters without blanks at either end")
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise ForedraftError("the admin key equals the API key, which all clients have; give another one")
