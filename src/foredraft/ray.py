"""`foredraft.ray:app`: the server as an application of Ray Serve. Needs the extra [ray].

serve run foredraft.ray:app replicas=2
serve deploy config.yaml                  # with import_path: foredraft.ray:app and args: {replicas: 2}
"""

from collections.abc import Mapping
from typing import Any

from foredraft.cli.backend import CliBackend, resolve_single_method
from foredraft.cli.named_options import parse_named_options
from foredraft.cli.replicas import build_replica_spec
from foredraft.cli.serve import (
    ModelLoader,
    ServeOptions,
    build_settings,
    build_worker_limits,
    resolve_options,
    serve,
)
from foredraft.cli.shell import UsageError

NOT_HERE = ("host", "port")  # Ray's HTTP proxy listens; its address is in Ray's configuration


def app(args: Mapping[str, Any]) -> Any:
    """Build the application of Ray Serve.

    Args:
        args: options of `foredraft serve` by name, with - or _, such as {"model": "org/name", "replicas": 2}. A flag
            takes true or false, a repeatable option a list. Default of `replicas`: 1.

    Raises:
        ForedraftError: an option is unknown or has an invalid value, or Ray is not installed.
    """
    for name in NOT_HERE:
        if name in args:
            raise UsageError(f"the option {name!r} is Ray's: give it in http_options of the configuration of Ray Serve")
    options = resolve_options(ServeOptions(**parse_named_options(serve, {"replicas": 1, **args})))
    settings = build_settings(options)
    kv_memory = options.kv_bytes
    loader = ModelLoader(options, resolve_single_method(options, CliBackend(), "a server"), kv_memory)
    spec = build_replica_spec(options, settings, build_worker_limits(options), loader, options.max_batch)
    from foredraft.ray_serve.deployments import build_app

    return build_app(spec)
