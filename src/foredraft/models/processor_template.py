"""Chat templates of multimodal processors, made usable for text: found in their own file, and given parts of contents.

Older folders keep the template in `chat_template.json`, which tokenizers of transformers do not read. Some templates
read contents that are lists of parts alone, and write nothing for a string.
"""

import re
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from foredraft.files.file_checks import read_json
from foredraft.models.folder import FOLDER_TITLE

TEMPLATE_FILE = "chat_template.json"
# Turns every content that is a string into one part. The last expression protects whitespace that follows.
PARTS_PREAMBLE = """\
{%- set text_rows = namespace(all=[]) -%}
{%- for message in messages -%}
{%- if message.content is string -%}
{%- set parts = [{'type': 'text', 'text': message.content}] -%}
{%- set text_rows.all = text_rows.all + [dict(message, content=parts)] -%}
{%- else -%}
{%- set text_rows.all = text_rows.all + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = text_rows.all -%}
{{- '' }}"""
_PART_TYPE = re.compile(r"\btype\b")  # in every template that distinguishes parts
_PROBE = "probe of content"


def adapt_template(tokenizer: Any, name: str) -> None:
    """Give a tokenizer the chat template of its processor, and let the template take contents that are strings.

    Args:
        tokenizer: tokenizer of transformers, which is changed.
        name: model folder or hub id.

    Raises:
        ForedraftError: the file of the template is damaged.
    """
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _read_processor_template(name)
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = adapt_source(tokenizer, tokenizer.chat_template)


def adapt_given(tokenizer: Any | None, source: str | None) -> str | None:
    """Return the source of a given template, as of `adapt_source`; None and any source without a tokenizer stay."""
    return source if tokenizer is None or source is None else adapt_source(tokenizer, source)


def adapt_source(tokenizer: Any, source: str) -> str:
    """Return the source of a template that takes contents that are strings.

    Args:
        tokenizer: tokenizer of transformers, which renders it.
        source: Jinja source of a template, of the tokenizer or of the user.
    """
    if not _PART_TYPE.search(source) or source.startswith(PARTS_PREAMBLE):
        return source
    shows_text = _shows(tokenizer, source, _PROBE)
    takes_parts = not shows_text and _shows(tokenizer, source, [{"type": "text", "text": _PROBE}])
    return PARTS_PREAMBLE + source if takes_parts else source


def _read_processor_template(name: str) -> str | None:
    path = Path(name).expanduser()
    file = path / TEMPLATE_FILE if path.is_dir() else _fetch(name)
    if file is None or not file.exists():
        return None
    template = read_json(file, name, FOLDER_TITLE).get("chat_template")
    return template if isinstance(template, str) else None


def _fetch(name: str) -> Path | None:
    """Fetch the file of a hub id; None if there is none."""
    found = cached_file(
        name, TEMPLATE_FILE, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def _shows(tokenizer: Any, source: str, content: Any) -> bool:
    """Whether a template writes the text of a content."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], chat_template=source, tokenize=False
        )
    except Exception:  # a template may raise any type
        return False
    return _PROBE in text
