"""Chat templates of processors, for text."""

import json
from pathlib import Path
from typing import Any

import pytest

from foredraft import ForedraftError
from foredraft.chat import encode_chat
from foredraft.models.processor_template import TEMPLATE_FILE, adapt_given, adapt_source, adapt_template
from foredraft.server.schemas import ChatMessage
from foredraft.server.settings import ServerSettings
from foredraft.server.templates import ChatTemplate
from foredraft.server.vocabulary import ServerVocabulary
from tests.support.server.scripted_llm import make_control_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "user", "content": [{"type": "text", "text": "Yo"}]}]
PARTS = (
    "\n{% for m in messages %}{{ m.role }}:{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}"
    "{% endfor %};{% endfor %}{{ 'bot:' if add_generation_prompt }}"
)
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
STRINGS = "{% for m in messages %}{{ m.content }};{% endfor %}"


@pytest.fixture
def tokenizer() -> Any:
    tokenizer = make_control_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def render(tokenizer: Any) -> str:
    return str(tokenizer.decode(encode_chat(tokenizer, MESSAGES)))


def test_a_template_for_parts_takes_strings(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = PARTS
    adapt_template(tokenizer, str(tmp_path))
    assert render(tokenizer) == "\nuser:Hi;user:Yo;bot:"


def test_a_given_template_for_parts_takes_strings(tokenizer: Any) -> None:
    """Fault: a template of --chat-template for images left the text of messages out."""
    ids = encode_chat(tokenizer, MESSAGES, chat_template=adapt_given(tokenizer, PARTS))
    assert tokenizer.decode(ids) == "\nuser:Hi;user:Yo;bot:"
    settings = ServerSettings(chat_template=PARTS)
    template = ChatTemplate(ServerVocabulary(tokenizer, len(tokenizer)), settings)
    assert "Hi;user:Yo;" in tokenizer.decode(template.encode([ChatMessage(**message) for message in MESSAGES]))
    assert adapt_source(tokenizer, adapt_source(tokenizer, PARTS)) == adapt_source(tokenizer, PARTS)


@pytest.mark.parametrize("source", [BOTH, STRINGS])
def test_other_templates_stay(tokenizer: Any, tmp_path: Path, source: str) -> None:
    tokenizer.chat_template = source
    adapt_template(tokenizer, str(tmp_path))
    assert tokenizer.chat_template == source
    assert render(tokenizer) == "Hi;Yo;"


def test_the_template_of_an_older_processor_is_found(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_FILE).write_text(json.dumps({"chat_template": PARTS}))
    adapt_template(tokenizer, str(tmp_path))
    assert render(tokenizer) == "\nuser:Hi;user:Yo;bot:"


def test_a_folder_without_a_template_has_none(tokenizer: Any, tmp_path: Path) -> None:
    adapt_template(tokenizer, str(tmp_path))
    assert tokenizer.chat_template is None


def test_a_damaged_file_is_named(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / TEMPLATE_FILE).write_text("{")
    with pytest.raises(ForedraftError, match=TEMPLATE_FILE):
        adapt_template(tokenizer, str(tmp_path))
