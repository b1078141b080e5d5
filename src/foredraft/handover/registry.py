"""Registry of the engines: the modules of `engines/` with an `EngineTable` named ENGINE. There is no other list."""

import importlib
import pkgutil
from functools import cache

from foredraft.errors import ForedraftError, suggest
from foredraft.handover.engine import EngineTable


@cache
def load_engines() -> dict[str, EngineTable]:
    """Import all engines. Returns them by name."""
    import foredraft.handover.engines as package

    modules = [
        importlib.import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)
    ]
    return {module.ENGINE.name: module.ENGINE for module in modules}


def find_engine(name: str) -> EngineTable:
    """Return the engine of a name. Raises ForedraftError for an unknown one."""
    engines = load_engines()
    if name not in engines:
        raise ForedraftError(f"unknown engine {name!r}; use one of: {', '.join(engines)}{suggest(name, [*engines])}")
    return engines[name]
