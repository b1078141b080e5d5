"""`foredraft serve`: a model behind OpenAI's API."""

import ipaddress
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.backend import CliBackend, load_llm, resolve_single_method
from foredraft.cli.options import AUTO, NONE, ModelOptions, _make_option, with_options
from foredraft.cli.prompts import read_template_file
from foredraft.cli.shell import UsageError, print_line
from foredraft.cli.speculative_config import read_speculative_config
from foredraft.errors import ForedraftError, format_install_command

if TYPE_CHECKING:
    from foredraft.engine.worker import WorkerLimits
    from foredraft.llm import LLM
    from foredraft.server.settings import ServerSettings

SERVER_PANEL, LOAD_PANEL = "Server", "Load"
API_KEY_VARIABLE = "FOREDRAFT_API_KEY"
INSTALL_ERROR = f"foredraft serve needs FastAPI, uvicorn and prometheus-client: {format_install_command('serve')}"
_SIZE_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class ServeOptions(ModelOptions):
    model_argument: Annotated[
        str | None, typer.Argument(help="The same as --model.", metavar="[MODEL]", show_default=False)
    ] = None
    host: Annotated[str, _make_option("Address to listen on; 0.0.0.0 is every one.", panel=SERVER_PANEL)] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 is any free one.", rich_help_panel=SERVER_PANEL, min=0, max=65535)] = 8000
    served_model_name: Annotated[
        list[str] | None,
        _make_option(
            "What clients call the model; repeatable. Not given: the folder's name or Hub id.", panel=SERVER_PANEL
        ),
    ] = None
    api_key: Annotated[
        str | None, _make_option(f"Asked of every client; {API_KEY_VARIABLE} does the same.", panel=SERVER_PANEL)
    ] = None
    chat_template: Annotated[
        str | None,
        _make_option(
            "File with a Jinja template; 'plain' writes role: content lines where the model has none (the default), "
            "'none' refuses chats then.",
            panel=SERVER_PANEL,
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _make_option(
            "Without an API key, on an address of this machine alone: a further name that clients may use for it; "
            "repeatable.",
            panel=SERVER_PANEL,
            metavar="NAME",
        ),
    ] = None
    strict_max_tokens: Annotated[
        bool,
        _make_option(
            "Refuse a max_tokens that the context has no room for; otherwise as many as fit.",
            "--strict-max-tokens",
            panel=SERVER_PANEL,
        ),
    ] = False
    access_log: Annotated[
        bool, _make_option("One line on standard error for every request.", "--access-log", panel=SERVER_PANEL)
    ] = False
    protect_metrics: Annotated[
        bool, _make_option("Ask for the API key at /metrics and /version too.", "--protect-metrics", panel=SERVER_PANEL)
    ] = False
    per_request_spec_metrics: Annotated[
        bool,
        _make_option("Figures of speculation in every response.", "--per-request-spec-metrics", panel=SERVER_PANEL),
    ] = False
    no_vllm_metrics: Annotated[
        bool, _make_option("Metrics under our own names alone.", "--no-vllm-metrics", panel=SERVER_PANEL)
    ] = False

    max_batch: Annotated[int, typer.Option(help="Requests that run at once.", rich_help_panel=LOAD_PANEL, min=1)] = 32
    max_chunk: Annotated[
        int, typer.Option(help="Prompt tokens of one request in one pass.", rich_help_panel=LOAD_PANEL, min=1)
    ] = 512
    kv_memory: Annotated[
        str | None,
        _make_option("For keys and values, e.g. 2GiB; a quarter of what is free if not given.", panel=LOAD_PANEL),
    ] = None
    no_prefix_cache: Annotated[
        bool, _make_option("Do not keep the prompts of ended requests.", "--no-prefix-cache", panel=LOAD_PANEL)
    ] = False
    max_queue: Annotated[
        int, typer.Option(help="Requests that wait; more are sent away with 429.", rich_help_panel=LOAD_PANEL, min=1)
    ] = 256
    request_timeout: Annotated[
        float, typer.Option(help="Seconds a request may take in all; 0 is any.", rich_help_panel=LOAD_PANEL, min=0)
    ] = 600.0
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds requests may go on when the server stops.", rich_help_panel=LOAD_PANEL, min=0)
    ] = 30.0


@with_options(ServeOptions)
def serve(ctx: typer.Context, options: ServeOptions) -> None:
    """Serve a model over OpenAI's API, with metrics for Prometheus, until SIGTERM or Ctrl-C.

    Example: foredraft serve --port 8000, then curl localhost:8000/v1/models
    """
    options = read_speculative_config(_apply_positional(options))
    backend: CliBackend = ctx.obj or CliBackend()
    settings = build_settings(options)
    kv_memory = None if options.kv_memory is None else parse_size(options.kv_memory)
    method = resolve_single_method(options, backend, "a server")
    try:
        from foredraft.server.lifecycle import listen
        from foredraft.server.lifecycle import serve as run
        from foredraft.server.service import Service
    except ModuleNotFoundError as error:
        if str(error.name).startswith("foredraft"):
            raise
        raise ForedraftError(INSTALL_ERROR) from None
    if settings.has_access_log:
        _enable_access_log()
    with listen(options.host, options.port) as sock:
        where = f"http://{options.host}:{sock.getsockname()[1]}"
        if settings.api_key is None and not is_local(options.host):
            print_line(f"warning: all clients of {where} can use the model; set --api-key or {API_KEY_VARIABLE}")
        print_line(f"loading {settings.model_names[0]}; {where} answers meanwhile")
        service = Service(settings, _build_worker_limits(options))
        loader = _make_loader(options, method, kv_memory)

        def ready() -> None:
            drafter = f" ({service.llm.drafter_name})" if method == AUTO else ""  # it says what it picked
            print_line(f"serving {settings.model_names[0]} at {where} with --spec-method {method}{drafter}")

        run(service, sock, loader, ready)


def _apply_positional(options: ServeOptions) -> ServeOptions:
    """`serve MODEL`, as vLLM has it. Raises UsageError if --model is given too."""
    if options.model_argument is None:
        return options
    if options.model is not None:
        raise UsageError("the model stands as an argument and in --model; give it once")
    return replace(options, model=options.model_argument, model_argument=None)


def build_settings(options: ServeOptions) -> "ServerSettings":
    """Raises UsageError."""
    from foredraft.server.settings import ServerSettings

    key = options.api_key if options.api_key is not None else os.environ.get(API_KEY_VARIABLE)
    key = None if key is None else key.strip()  # one from a file ends with a line break
    if key == "":
        raise UsageError(f"the API key is empty; give --api-key or {API_KEY_VARIABLE} a value, or leave it out")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UsageError(
            f"the API key holds characters that no HTTP header can; give --api-key or {API_KEY_VARIABLE} in ASCII"
        )
    if options.protect_metrics and key is None:
        raise UsageError(f"--protect-metrics needs an API key; give --api-key or {API_KEY_VARIABLE}")
    return ServerSettings(
        model_names=read_model_names(options),
        api_key=key,
        allowed_hosts=_read_allowed_hosts(options, key),
        has_strict_max_tokens=options.strict_max_tokens,
        has_access_log=options.access_log,
        protects_metrics=options.protect_metrics,
        request_timeout=options.request_timeout or None,
        drain_timeout=options.drain_timeout,
        chat_template=_read_template(options.chat_template),
        has_plain_template=options.chat_template != NONE,
        has_spec_metrics=options.per_request_spec_metrics,
        has_vllm_names=not options.no_vllm_metrics,
    )


def is_local(host: str) -> bool:
    """Whether no other machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_allowed_hosts(options: ServeOptions, key: str | None) -> tuple[str, ...] | None:
    """A server that only this machine reaches, and that asks for no key, must not answer to a web page's name."""
    if options.allowed_host and (key is not None or not is_local(options.host)):
        raise UsageError(
            "--allowed-host is for a server without an API key on an address of this machine; leave it out"
        )
    if key is not None or not is_local(options.host):
        return None
    return tuple(name.lower() for name in options.allowed_host or ())


def _enable_access_log() -> None:
    """Log each request as one line on standard error, without level and logger name."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    access = logging.getLogger("foredraft.access")
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    access.propagate = False


def read_model_names(options: ServeOptions) -> tuple[str, ...]:
    """Return the names that clients use. A local folder is known by its last part, not by its path."""
    if options.served_model_name:
        names = tuple(dict.fromkeys(options.served_model_name))
        if not all(name.strip() for name in names):
            raise UsageError("--served-model-name is empty; give a name or leave it out")
        return names
    if options.model is None:
        return ("builtin",)
    folder = Path(options.model).expanduser()
    return (folder.resolve().name if folder.is_dir() else options.model,)


def parse_size(text: str) -> int:
    """Bytes of a size such as 2GiB, 512M or 1.5g; a unit is a power of 1024. Raises UsageError."""
    found = _SIZE_PATTERN.fullmatch(text)
    size = 0 if found is None else int(float(found[1]) * 1024 ** " KMGT".index((found[2] or " ").upper()))
    if size < 1:
        raise UsageError(f"--kv-memory takes a size such as 2GiB or 512M, got {text!r}")
    return size


def _read_template(chosen: str | None) -> str | None:
    """The source of a template file; None where a word was given, or nothing."""
    if chosen is None or chosen in (NONE, "plain"):
        return None
    return read_template_file(chosen)


def _build_worker_limits(options: ServeOptions) -> "WorkerLimits":
    from foredraft.engine.worker import WorkerLimits

    return WorkerLimits(max_queue=options.max_queue)


def _make_loader(options: ServeOptions, method: str, kv_memory: int | None) -> "Callable[[], LLM]":
    def load() -> "LLM":
        from foredraft.llm import MemoryLimits

        given: dict[str, Any] = {} if kv_memory is None else {"kv_memory": kv_memory}
        limits = MemoryLimits(max_batch=options.max_batch, prefix_cache=not options.no_prefix_cache, **given)
        llm = load_llm(options, method, limits)
        scheduler = llm.engine.scheduler
        scheduler.limits = replace(scheduler.limits, max_chunk=options.max_chunk)
        if llm.is_adaptive:
            llm.calibrate()
        return llm

    return load
