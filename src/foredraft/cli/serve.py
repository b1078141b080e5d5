"""`foredraft serve`: an HTTP server with OpenAI's API.

This file turns options into settings and loads the model; the server is in `foredraft.server`.
"""

import ipaddress
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from foredraft.cli.access_log import enable_access_log
from foredraft.cli.backend import CliBackend, load_llm, resolve_single_method
from foredraft.cli.engine_options import LOAD_PANEL
from foredraft.cli.image_options import ImageServeOptions
from foredraft.cli.keys import read_key
from foredraft.cli.message_formats import (
    CALL_FORMAT_NAMES,
    REASONING_FORMAT_NAMES,
    read_format,
)
from foredraft.cli.model_list import ADMIN_KEY_VARIABLE, describe_models, resolve_models
from foredraft.cli.model_sources import SourceBuilder
from foredraft.cli.options import NONE, _make_option, with_options
from foredraft.cli.prompts import read_template_file
from foredraft.cli.replicas import build_replica_spec, serve_replicas
from foredraft.cli.shell import UsageError, print_line
from foredraft.cli.simulation import describe_simulation, read_drafter_options
from foredraft.errors import ForedraftError, format_install_command

if TYPE_CHECKING:
    from foredraft.engine.worker import WorkerLimits
    from foredraft.llm import LLM
    from foredraft.server.kv_shares import KVShare
    from foredraft.server.settings import ServerSettings

SERVER_PANEL = "Server"
API_KEY_VARIABLE = "FOREDRAFT_API_KEY"
INSTALL_ERROR = f"foredraft serve needs FastAPI, uvicorn and prometheus-client: {format_install_command('serve')}"


@dataclass(frozen=True)
class ServeOptions(ImageServeOptions):
    """Options of `foredraft serve`."""

    model_argument: Annotated[
        str | None,
        typer.Argument(
            help="Folder, Hub id or GGUF file of the target, as in --model. Default: the built-in model.",
            metavar="[MODEL]",
            show_default=False,
        ),
    ] = None
    host: Annotated[
        str, _make_option("Address to listen on; 0.0.0.0 is all addresses of this machine.", panel=SERVER_PANEL)
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(help="Port to listen on; 0 is any free port.", rich_help_panel=SERVER_PANEL, min=0, max=65535),
    ] = 8000
    api_key: Annotated[
        str | None,
        _make_option(
            f"API key that clients must send. Default: the environment variable {API_KEY_VARIABLE}, else none.",
            panel=SERVER_PANEL,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _make_option(
            "File with a Jinja chat template. For a model without a template, 'plain' writes lines of the form role: "
            "content, and 'none' refuses chat requests. Default: the model's template, else plain.",
            panel=SERVER_PANEL,
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _make_option(
            "Further host name that clients may send; repeatable. Only for a server without an API key on a loopback "
            "address.",
            panel=SERVER_PANEL,
            metavar="NAME",
        ),
    ] = None
    strict_max_tokens: Annotated[
        bool,
        _make_option(
            "Refuse a request whose max_tokens exceeds the context. Without it, the server generates as many tokens "
            "as fit.",
            "--strict-max-tokens",
            panel=SERVER_PANEL,
        ),
    ] = False
    access_log: Annotated[
        bool, _make_option("Log each request as one line on standard error.", "--access-log", panel=SERVER_PANEL)
    ] = False
    protect_metrics: Annotated[
        bool,
        _make_option("Require the API key for /metrics and /version too.", "--protect-metrics", panel=SERVER_PANEL),
    ] = False
    per_request_spec_metrics: Annotated[
        bool,
        _make_option(
            "Add the figures of speculative decoding to every response.",
            "--per-request-spec-metrics",
            panel=SERVER_PANEL,
        ),
    ] = False
    traces: Annotated[
        bool,
        _make_option(
            "Serve the target's hidden states at /v1/traces, for `foredraft train --target-url`.",
            "--traces",
            panel=SERVER_PANEL,
        ),
    ] = False
    no_vllm_metrics: Annotated[
        bool,
        _make_option("Report metrics without vLLM's names for them.", "--no-vllm-metrics", panel=SERVER_PANEL),
    ] = False

    max_step_tokens: Annotated[
        int,
        typer.Option(
            "--max-step-tokens",
            "--max-num-batched-tokens",
            help="Most tokens of a forward pass: prompts, last tokens and draft tokens of all requests.",
            rich_help_panel=LOAD_PANEL,
            min=1,
        ),
    ] = 2048
    max_chunk: Annotated[
        int,
        typer.Option(help="Most prompt tokens of one request in a forward pass.", rich_help_panel=LOAD_PANEL, min=1),
    ] = 512
    no_prefix_cache: Annotated[
        bool,
        _make_option("Do not reuse computed prompts in later requests.", "--no-prefix-cache", panel=LOAD_PANEL),
    ] = False
    max_queue: Annotated[
        int,
        typer.Option(help="Most requests that wait; further ones get status 429.", rich_help_panel=LOAD_PANEL, min=1),
    ] = 256
    request_timeout: Annotated[
        float,
        typer.Option(
            help="Time limit of a request, in seconds from arrival; 0 is none.", rich_help_panel=LOAD_PANEL, min=0
        ),
    ] = 600.0
    drain_timeout: Annotated[
        float,
        typer.Option(
            help="Time for running requests to finish when the server stops, in seconds.",
            rich_help_panel=LOAD_PANEL,
            min=0,
        ),
    ] = 30.0


Options = TypeVar("Options", bound=ServeOptions)


@with_options(ServeOptions)
def serve(ctx: typer.Context, options: ServeOptions) -> None:
    """Serve a model with OpenAI's API and Prometheus metrics, until SIGTERM or Ctrl-C.

    Example: foredraft serve --port 8000, then curl localhost:8000/v1/models
    """
    options = resolve_options(options)
    backend: CliBackend = ctx.obj or CliBackend()
    settings = build_settings(options)
    kv_memory = options.kv_bytes
    try:
        from foredraft.server.admin import AdminRoutes
        from foredraft.server.lifecycle import listen
        from foredraft.server.lifecycle import serve as run
        from foredraft.server.model_host import ModelHost
    except ModuleNotFoundError as error:
        if str(error.name).startswith("foredraft"):
            raise
        raise ForedraftError(INSTALL_ERROR) from None
    if settings.has_access_log:
        enable_access_log()
    limits = build_worker_limits(options)

    def make_loader(model_options: ServeOptions, lora: str | None) -> ModelLoader:
        method = resolve_single_method(model_options, backend, "a server")
        return ModelLoader(model_options, method, kv_memory, lora)

    builder = SourceBuilder(options, build_settings, make_loader, limits, serve)
    sources = builder.build_first()
    names = ", ".join(source.name for source in sources)
    spec = None
    if options.replicas is not None:
        loader = make_loader(options, None)
        spec = build_replica_spec(options, settings, limits, loader, options.max_batch)
    with listen(options.host, options.port) as sock:
        url = f"http://{options.host}:{sock.getsockname()[1]}"
        if settings.api_key is None and not is_local(options.host):
            print_line(f"warning: all clients of {url} can use the model; set --api-key or {API_KEY_VARIABLE}")
        print_line(f"loading {names}; {url} answers meanwhile")
        if spec is not None:
            how = f"{describe_drafts(options, loader.method)} and {spec.description}"
            text = f"serving {names} at {url} with {how}"
            serve_replicas(spec, sock, lambda: print_line(text))
            return
        host = ModelHost(settings, sources, kv_memory, print_line)
        admin = None
        if settings.admin_key is not None:
            admin = AdminRoutes(host, lambda request: builder.build_requested(request, host.models.names))
        is_only = not options.models and not options.lora
        drafts = describe_drafts(options, resolve_single_method(options, backend, "a server")) if is_only else None
        run(host.models, sock, host.load_first, lambda: print_line(describe_models(host.models, url, drafts)), admin)


def describe_drafts(options: ServeOptions, method: str) -> str:
    """Return the option that decides how the server drafts, for the message at the start."""
    if options.spec_simulate is None:
        return f"--spec-method {method}"
    return f"--spec-simulate {options.spec_simulate:g} ({describe_simulation(options.spec_simulate)})"


def resolve_options(options: ServeOptions) -> ServeOptions:
    """Apply the positional argument, a single --model and --speculative-config.

    Raises:
        UsageError: for options that exclude each other.
    """
    options = read_drafter_options(apply_positional(options))
    if options.admin_key is None:
        options = replace(options, admin_key=os.environ.get(ADMIN_KEY_VARIABLE))
    if options.draft_length == 0:
        raise UsageError(
            "--spec-tokens 0 is for one call; a server without drafts has --spec-method none, and a request without "
            'drafts the field "speculative": {"num_speculative_tokens": 0}'
        )
    options.check_replicas()
    options.check_models()
    if options.traces and options.has_models:
        raise UsageError(
            "--traces shows the only model of a server; leave --model NAME=PATH, --lora and --admin-key out"
        )
    return options


def apply_positional(options: Options) -> Options:
    """Move the argument of `serve MODEL`, or a --model without a name, to the field `model`.

    Raises:
        UsageError: the model is given twice, or several models have no names.
    """
    if options.model_argument is None:
        return resolve_models(options)
    if options.model is not None or options.models:
        raise UsageError("the model is given as an argument and with --model; give it once")
    return resolve_models(replace(options, models=[options.model_argument], model_argument=None))


def build_settings(options: ServeOptions) -> "ServerSettings":
    """Return the settings of the server. Raises UsageError for an invalid API key, name, host or template."""
    from foredraft.server.settings import ServerSettings

    key = read_key("API", "--api-key", options.api_key, API_KEY_VARIABLE)
    admin_key = read_key("admin", "--admin-key", options.admin_key, ADMIN_KEY_VARIABLE)
    if admin_key is not None and admin_key == key:
        raise UsageError("--admin-key equals the API key, which all clients have; give another one")
    if options.protect_metrics and key is None:
        raise UsageError(f"--protect-metrics needs an API key; give --api-key or {API_KEY_VARIABLE}")
    return ServerSettings(
        model_names=read_model_names(options),
        api_key=key,
        admin_key=admin_key,
        allowed_hosts=_read_allowed_hosts(options, key),
        has_strict_max_tokens=options.strict_max_tokens,
        has_access_log=options.access_log,
        protects_metrics=options.protect_metrics,
        request_timeout=options.request_timeout or None,
        drain_timeout=options.drain_timeout,
        chat_template=_read_template(options.chat_template),
        has_plain_template=options.chat_template != NONE,
        tool_call_parser=read_format("--tool-call-parser", options.tool_call_parser, CALL_FORMAT_NAMES),
        reasoning_parser=read_format("--reasoning-parser", options.reasoning_parser, REASONING_FORMAT_NAMES),
        has_spec_metrics=options.per_request_spec_metrics,
        has_vllm_names=not options.no_vllm_metrics,
        has_traces=options.traces,
        stored_responses=options.stored_responses,
        stored_response_bytes=options.stored_response_bytes,
        media_folder=options.media_folder,
        limits=options.make_limits(),
    )


def is_local(host: str) -> bool:
    """Return whether `host` is a loopback address, which no other machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_allowed_hosts(options: ServeOptions, key: str | None) -> tuple[str, ...] | None:
    """Return the host names besides the loopback ones that requests may carry; None = any name.

    The check applies to a server without an API key on a loopback address. Without it, a web page in a local browser
    could reach the server through a host name that resolves to this machine.
    """
    if options.allowed_host and (key is not None or not is_local(options.host)):
        raise UsageError("--allowed-host is for a server without an API key on a loopback address; leave it out")
    if key is not None or not is_local(options.host):
        return None
    return tuple(name.lower() for name in options.allowed_host or ())


def read_model_names(options: ServeOptions) -> tuple[str, ...]:
    """Return the names of the model in requests; for a local folder the last part of its path."""
    if options.served_model_name:
        names = tuple(dict.fromkeys(options.served_model_name))
        if not all(name.strip() for name in names):
            raise UsageError("--served-model-name is empty; give a name or leave it out")
        return names
    return (read_model_name(options.model),)


def read_model_name(model: str | None) -> str:
    """Return the name of a model in requests; for a local folder or file the last part of its path."""
    if model is None:
        return "builtin"
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else path.stem if path.is_file() else model


def _read_template(name: str | None) -> str | None:
    """Return the source of a template file; None for a keyword or without an option."""
    if name is None or name in (NONE, "plain"):
        return None
    return read_template_file(name)


def build_worker_limits(options: ServeOptions) -> "WorkerLimits":
    """Return the limits of the queue."""
    from foredraft.engine.worker import WorkerLimits

    return WorkerLimits(max_queue=options.max_queue)


@dataclass(frozen=True)
class ModelLoader:
    """Loader of the model of a server. It can be pickled, so that replicas load their own.

    Args:
        options: of the command.
        method: drafting method.
        kv_memory: bytes of the KV cache of a server with this model alone; None = the default.
        lora: folder of an adapter. Default None = the model itself.
    """

    options: ServeOptions
    method: str
    kv_memory: int | None
    lora: str | None = None

    def __call__(self) -> "LLM":
        """Load the target and the drafter of a server with this model alone."""
        from foredraft.server.kv_shares import KVShare

        return self.load(KVShare(self.kv_memory), None)

    def load(self, share: "KVShare", base: "LLM | None") -> "LLM":
        """Load the target and the drafter.

        Args:
            share: part of the KV memory.
            base: loaded LLM of the adapter's base; None = a model of its own.
        """
        from foredraft.llm import MemoryLimits

        options = self.options
        limits = MemoryLimits(
            max_batch=options.max_batch,
            max_step_tokens=options.max_step_tokens,
            prefix_cache=not options.no_prefix_cache,
            kv_memory=share.num_bytes,
            kv_share=share.share,
        )
        llm = load_llm(options, self.method, limits, self.lora, base)
        scheduler = llm.engine.scheduler
        scheduler.limits = replace(scheduler.limits, max_chunk=options.max_chunk)
        if llm.is_adaptive:
            llm.calibrate()
        return llm
