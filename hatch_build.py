"""Build hooks: compile the native library, and make the README fit for a package index.

Environment: FOREDRAFT_REQUIRE_NATIVE=1 fails the build if the library cannot be compiled. FOREDRAFT_PROJECT_URL is the
home of the source, for instance a GitHub address; with it links and images of the README become absolute.
"""

import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FOLDER = "src/foredraft/kernels/cpu"
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


class NativeHook(BuildHookInterface[Any]):
    """Puts the native library into the wheel; without a C compiler the wheel is pure Python."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return  # a source distribution is compiled where it is installed
        folder = Path(self.root) / FOLDER
        spec = importlib.util.spec_from_file_location("foredraft_native_build", folder / "build.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            module.build()
        except (RuntimeError, OSError) as error:
            if os.environ.get("FOREDRAFT_REQUIRE_NATIVE"):
                raise
            print(f"foredraft: without native kernels ({error})", file=sys.stderr)  # noqa: T201
            return
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["artifacts"].append(f"{FOLDER}/_foredraft.so")


class ReadmeHook(MetadataHookInterface):
    """Sets the long description and the project's addresses."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        home = os.environ.get("FOREDRAFT_PROJECT_URL", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": make_absolute(text, home)}
        metadata["urls"] = {}
        if home:
            names = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md"}
            metadata["urls"] = {name: home + path for name, path in names.items()} | {"Issues": f"{home}/issues"}


def make_absolute(text: str, home: str) -> str:
    """Links and images of a README with absolute addresses below `home`; without one they become plain text."""
    if not home:
        return LINK.sub(r"\1", IMAGE.sub("", text))
    text = IMAGE.sub(rf"![\1]({home}/raw/main/\2)", text)
    return LINK.sub(rf"[\1]({home}/blob/main/\2)", text)
