"""Where a checkpoint lies: a folder, or the hub's cache."""

from pathlib import Path

from foredraft.errors import ForedraftError

WANTED = ["*.json", "*.safetensors", "*.pt", "*.bin"]
UNWANTED = ["*optimizer*", "training_args.bin", "training_state.pt", "*/*"]


def find(name: str, wanted: list[str] | None = None) -> Path:
    """The local folder of a path or hub id, fetched where it is not in the cache. Raises ForedraftError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ForedraftError(f"{name} is a file; give the folder that holds config.json and the weights")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ForedraftError(f"{name} does not exist; give a drafter's folder or a hub id such as org/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=wanted or WANTED, ignore_patterns=UNWANTED))
    except Exception as error:  # the hub raises dozens of kinds
        raise _reason(name, error) from None


def _reason(name: str, error: Exception) -> ForedraftError:
    text = f"{type(error).__name__}: {error}".lower()
    if any(word in text for word in ("gated", "401 client", "403 client")):
        return ForedraftError(
            f"{name} is gated or private: ask for access on its page, then log in with `hf auth login`"
        )
    if any(word in text for word in ("repositorynotfound", "404 client", "hfvalidation")):
        return ForedraftError(f"{name} is neither a local folder nor a model on the hub; check the spelling")
    if any(word in text for word in ("connect", "offline", "locate", "localentrynotfound", "resolve")):
        return ForedraftError(
            f"{name} is not in the local cache and could not be fetched; check the name or the network"
        )
    first = str(error).strip().partition("\n")[0]
    return ForedraftError(f"{name} could not be fetched ({type(error).__name__}: {first[:200]})")
