"""The wheel carries the native library where a C compiler is at hand, and works without it where none is."""

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "src/foredraft/kernels/cpu"


class NativeHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
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
