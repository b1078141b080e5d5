"""Lines of a batch file: requests in OpenAI's batch format, plain prompts and chats."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foredraft.errors import ForedraftError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)
TEXT_SUFFIXES = (".txt", ".text")  # files with one prompt per line
_FORMAT_FIELDS = ("custom_id", "method", "url", "body")
_UNKNOWN_ID = "line-{}"
_SURROGATES = re.compile("[\ud800-\udfff]")  # halves of pairs, which UTF-8 cannot encode


@dataclass(frozen=True)
class LineFormat:
    """How lines are read.

    Attributes:
        is_text: a line is a prompt, not JSON.
        is_chat: a plain prompt is a message of a user.
        plain_fields: fields of a plain prompt's request that it leaves out.
        fields: fields of every request that it leaves out; they precede `plain_fields`.
        seed: seed of the job. A request without a seed gets one of this seed and its line number, so that a job writes
            the same file again.
    """

    is_text: bool = False
    is_chat: bool = False
    plain_fields: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class BatchLine:
    """One request of a batch file.

    Attributes:
        number: number of the line, from 1 up.
        custom_id: name in the results; "line-<number>" if the line has none.
        url: route, such as /v1/completions.
        body: body of the request.
        error: why the line is no request; "" if it is one.
    """

    number: int
    custom_id: str
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def read_lines(file: Path, line_format: LineFormat) -> Iterator[BatchLine]:
    """Read the requests of a file; empty lines are skipped.

    Raises:
        ForedraftError: the file cannot be read or is not UTF-8.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as source:
            for number, text in enumerate(source, 1):
                if text.strip():
                    yield parse_line(text.rstrip("\r\n"), number, line_format)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ForedraftError(f"{str(file)!r} cannot be read: {reason}") from None
    except UnicodeDecodeError:
        raise ForedraftError(f"{str(file)!r} is not UTF-8; save it as UTF-8 first") from None


def parse_line(text: str, number: int, line_format: LineFormat) -> BatchLine:
    """Parse one line. A line that is no request has an error instead of a body."""
    default_id = _UNKNOWN_ID.format(number)
    if line_format.is_text:
        return _build_plain(text, default_id, number, line_format)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return BatchLine(number, default_id, error="the line is not JSON; plain prompts go into a file named *.txt")
    if isinstance(value, str):
        return _build_plain(value, default_id, number, line_format)
    if not isinstance(value, dict):
        return BatchLine(number, default_id, error="the line must be a JSON object or a string")
    custom_id = value.get("custom_id", default_id)
    if not isinstance(custom_id, str) or not custom_id or _SURROGATES.search(custom_id):
        return BatchLine(number, default_id, error="custom_id must be a string of Unicode characters")
    if "body" in value or "url" in value or "method" in value:
        return _build_request(value, custom_id, number, line_format)
    return _build_short(value, custom_id, number, line_format)


def _build_request(value: dict[str, Any], custom_id: str, number: int, line_format: LineFormat) -> BatchLine:
    """Build a request of OpenAI's batch format."""
    unknown = sorted(set(value) - set(_FORMAT_FIELDS))
    if unknown:
        return BatchLine(number, custom_id, error=f"unknown field {unknown[0]!r}; fields of the request go into body")
    if value.get("method", "POST") != "POST":
        return BatchLine(number, custom_id, error="method must be POST")
    if value.get("url") not in PATHS:
        return BatchLine(number, custom_id, error=f"url must be {' or '.join(PATHS)}")
    if not isinstance(value.get("body"), dict):
        return BatchLine(number, custom_id, error="body must be a JSON object, the request")
    return _complete(BatchLine(number, custom_id, value["url"], value["body"]), line_format, line_format.fields)


def _build_short(value: dict[str, Any], custom_id: str, number: int, line_format: LineFormat) -> BatchLine:
    """Build a request of an object that is a request itself: with a prompt, or with messages."""
    body = {name: entry for name, entry in value.items() if name != "custom_id"}
    if ("prompt" in body) == ("messages" in body):
        return BatchLine(number, custom_id, error="the line needs a prompt, or messages, or OpenAI's url and body")
    if isinstance(body.get("prompt"), str) and line_format.is_chat:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    url = CHAT if "messages" in body else COMPLETIONS
    fields = line_format.plain_fields | line_format.fields
    return _complete(BatchLine(number, custom_id, url, body), line_format, fields)


def _build_plain(text: str, custom_id: str, number: int, line_format: LineFormat) -> BatchLine:
    return _build_short({"prompt": text}, custom_id, number, line_format)


def _complete(line: BatchLine, line_format: LineFormat, fields: dict[str, Any]) -> BatchLine:
    """Add the fields that a request leaves out."""
    if line.body.get("stream"):
        return BatchLine(line.number, line.custom_id, error="a batch has no streams; leave stream out")
    body = fields | line.body
    if body.get("seed") is None:
        body["seed"] = line_format.seed + line.number
    return BatchLine(line.number, line.custom_id, line.url, body)


@dataclass(frozen=True)
class BatchInput:
    """Size and digest of a file, from its first reading."""

    num_lines: int
    digest: str


def examine_input(file: Path, line_format: LineFormat) -> BatchInput:
    """Read a file once before a job.

    Raises:
        ForedraftError: two lines have one custom_id, there is no line, or the file cannot be read.
    """
    first: dict[str, int] = {}
    for line in read_lines(file, line_format):
        if line.custom_id in first:
            raise ForedraftError(
                f"lines {first[line.custom_id]} and {line.number} have the same custom_id {line.custom_id!r}; "
                "results are found by it, so give each line its own"
            )
        first[line.custom_id] = line.number
    if not first:
        raise ForedraftError(f"{str(file)!r} has no lines; give one request or prompt per line")
    return BatchInput(len(first), hashlib.sha256(file.read_bytes()).hexdigest())
