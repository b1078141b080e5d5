"""Dockerfiles: stages and instructions, and rules for them in the manner of hadolint."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch

VARIABLE = re.compile(r"\$\{(\w+)\}")
SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET")
EXEC_FORMS = ("CMD", "ENTRYPOINT")


@dataclass(frozen=True)
class Instruction:
    keyword: str
    text: str


@dataclass(frozen=True)
class Stage:
    name: str
    base: str  # image, or name of an earlier stage
    instructions: list[Instruction] = field(default_factory=list)

    def find(self, keyword: str) -> list[str]:
        return [instruction.text for instruction in self.instructions if instruction.keyword == keyword]


@dataclass(frozen=True)
class Dockerfile:
    arguments: dict[str, str]  # of all ARG, with their defaults
    stages: dict[str, Stage]

    def find_last(self, stage: str, keyword: str) -> str | None:
        """Return the last text of an instruction in a stage, or in the stages that it is made from."""
        while stage in self.stages:
            found = self.stages[stage].find(keyword)
            if found:
                return found[-1]
            stage = self.stages[stage].base
        return None

    @property
    def targets(self) -> list[str]:
        """Names of the stages with an entry point."""
        return [name for name, stage in self.stages.items() if stage.find("ENTRYPOINT")]


def parse_dockerfile(text: str) -> Dockerfile:
    """Parse a Dockerfile without heredocs and parser directives."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        keyword, _, rest = " ".join(line.split()).partition(" ")
        if keyword == "ARG":
            name, _, value = rest.partition("=")
            arguments.setdefault(name, value.strip('"'))
        elif keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            base = VARIABLE.sub(lambda found: arguments.get(found[1], ""), base)
            stages[name or base] = stage = Stage(name or base, base)
            continue
        if keyword and stages:
            stage.instructions.append(Instruction(keyword, rest))
    return Dockerfile(arguments, stages)


def find_faults(text: str) -> Iterator[str]:
    """Find what breaks a rule. Each fault begins with the name of its stage."""
    dockerfile = parse_dockerfile(text)
    if "://" in re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE):
        yield "an address in the file: everything comes from base images and the configured package index"
    for name, stage in dockerfile.stages.items():
        yield from (f"{name}: {fault}" for fault in _find_stage_faults(stage, set(dockerfile.stages)))
    for name in dockerfile.targets:
        yield from (f"{name}: {fault}" for fault in _find_target_faults(dockerfile, name))


def _find_stage_faults(stage: Stage, names: set[str]) -> Iterator[str]:
    tag = stage.base.partition(":")[2]
    if stage.base not in names and (not re.search(r"\d", tag) or "latest" in tag):
        yield f"the base image {stage.base} is not pinned"
    if stage.find("ADD"):
        yield "ADD unpacks and downloads; use COPY"
    for command in stage.find("RUN"):
        if "apt-get install" in command:
            for part in ("apt-get update &&", "--no-install-recommends", "--yes", "rm -rf /var/lib/apt/lists/*"):
                if part not in command:
                    yield f"apt-get install without {part}"
        if re.search(r"\bpip (install|wheel)\b", command) and "--no-cache-dir" not in command:
            yield "pip without --no-cache-dir"
        if re.search(r"\b(sudo|curl|wget)\b", command):
            yield "sudo, curl or wget"
    for keyword in ("ENV", "ARG"):
        if any(SECRET.search(text) for text in stage.find(keyword)):
            yield f"a secret as {keyword}, which stays in the image"


def _find_target_faults(dockerfile: Dockerfile, name: str) -> Iterator[str]:
    user = dockerfile.find_last(name, "USER") or "root"
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user):
        yield f"runs as {user}, not as a user with a number"
    check = dockerfile.find_last(name, "HEALTHCHECK")
    if check is None:
        yield "no HEALTHCHECK"
    elif not _is_exec_form(check.partition("CMD ")[2]):
        yield "HEALTHCHECK in shell form"
    for keyword in EXEC_FORMS:
        if not _is_exec_form(dockerfile.find_last(name, keyword) or ""):
            yield f"{keyword} is absent or in shell form, in which a shell gets the signals"


def _is_exec_form(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except json.JSONDecodeError:
        return False


def is_in_context(path: str, patterns: list[str]) -> bool:
    """Return whether a builder sees a file, by the patterns of .dockerignore; the last one that matches decides."""
    parts = path.split("/")
    starts = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    is_seen = True
    for pattern in patterns:
        glob = pattern.removeprefix("!")
        if glob.startswith("**/"):
            matches = any(fnmatch(part, glob[3:]) for part in parts)
        else:
            matches = any(fnmatch(start, glob) and start.count("/") == glob.count("/") for start in starts)
        if matches:
            is_seen = pattern.startswith("!")
    return is_seen
