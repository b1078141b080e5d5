"""Templates in their sandbox: what they may do, and twenty ways out that are closed."""

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from foredraft.errors import ForedraftError
from foredraft.server.errors import ApiError
from foredraft.server.schemas import ChatMessage
from foredraft.server.settings import RequestLimits, ServerSettings
from foredraft.server.templates import ChatTemplate, compile_template, render_template
from foredraft.server.vocabulary import ServerVocabulary
from tests.support import tiny_models
from tests.support.server.live_server import make_small_llm

SAID = [ChatMessage(role="user", content="the end")]
MESSAGES = [{"role": "user", "content": "hello"}]
ESCAPES = (
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages[0].__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ cycler.__init__.__globals__.os.popen('id') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ (messages|first).__class__.__base__ }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
)
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 10000000000 }}",
    "{{ 9 ** 9999999 }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
)


@pytest.mark.parametrize("source", ESCAPES)
def test_there_is_no_way_out(source: str):
    """It is refused, or rendered as nothing: an object of the package never appears."""
    try:
        text = render_template(compile_template(source), {"messages": [dict(MESSAGES[0])]}, 2.0, 1 << 20)
    except ApiError as error:
        assert error.status == 400  # noqa: PT017
    else:
        assert "class" not in text
        assert "<" not in text
        assert text.strip() in ("", "[]", "[Undefined]")


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_takes_too_much_is_stopped(source: str):
    with pytest.raises(ApiError):
        render_template(compile_template(source), {"messages": MESSAGES}, 0.3, 1 << 20)


def test_a_template_that_does_not_compile():
    with pytest.raises(ForedraftError, match="does not compile"):
        compile_template("{% for %}")


def test_what_templates_of_the_hub_use():
    source = (
        "{%- set ns = namespace(n=0) %}{% for m in messages %}{% if loop.first and m.role != 'user' %}"
        "{{ raise_exception('no') }}{% endif %}{% set ns.n = ns.n + 1 %}{% if ns.n > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m | tojson }}{{ m.content | trim | upper }}{% endgeneration %}{% endfor %}{{ bos_token }}"
        "{{ strftime_now('%Y') | length }}"
    )
    text = render_template(compile_template(source), {"messages": MESSAGES * 3, "bos_token": "<s>"}, 2.0, 1000)
    assert text == '{"role": "user", "content": "hello"}HELLO<s>4'


def test_a_templates_own_complaint_reaches_the_client():
    templates = make_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ApiError, match="roles must alternate"):
        templates.encode([ChatMessage(role="user", content="x")])


def test_the_rendered_size_is_bounded():
    with pytest.raises(ApiError, match="longer than 100"):
        render_template(compile_template("{% for i in range(200) %}x{% endfor %}"), {}, 2.0, 100)


def make_template(source: str) -> ChatTemplate:
    llm = make_small_llm()
    settings = ServerSettings(chat_template=source, limits=RequestLimits())
    return ChatTemplate(ServerVocabulary(llm.tokenizer, llm.target.vocab_size), settings)


@pytest.mark.parametrize("is_plain", [True, False])
def test_an_encoder_sees_the_end_that_the_tokenizer_puts(is_plain: bool):
    """T5 has an end token after every source. Templates do not write it; if one does, the token is not doubled."""
    vocabulary = ServerVocabulary(_framing(), 320)
    begin, end = vocabulary.tokenizer.convert_tokens_to_ids(["<pad>", "<end>"])
    assert vocabulary.outer_tokens == ([begin], [end])
    bare = vocabulary.tokenizer("user: the end", add_special_tokens=False).input_ids
    own = "{% for m in messages %}user: {{ m.content }}{% endfor %}"
    of_encoder = ChatTemplate(vocabulary, _settings(is_plain, own), has_encoder=True).encode(SAID)
    of_decoder = ChatTemplate(vocabulary, _settings(is_plain, own)).encode(SAID)
    assert of_encoder == [*of_decoder, end]
    assert of_decoder[: 1 + len(bare)] == [begin, *bare] if is_plain else of_decoder == bare
    written = ChatTemplate(vocabulary, ServerSettings(chat_template=own + "<end>"), has_encoder=True).encode(SAID)
    assert written == [*bare, end]


def _settings(is_plain: bool, own: str) -> ServerSettings:
    return ServerSettings() if is_plain else ServerSettings(chat_template=own)


def _framing() -> PreTrainedTokenizerFast:
    """Make a tokenizer that puts <pad> before every text and <end> after it."""
    made = Tokenizer.from_str(tiny_models.tokenizer().backend_tokenizer.to_str())
    ids = {word: made.token_to_id(word) for word in ("<pad>", "<end>")}
    made.post_processor = TemplateProcessing(single="<pad> $A <end>", special_tokens=list(ids.items()))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def test_nothing_is_put_around_where_the_tokenizer_puts_nothing():
    assert ServerVocabulary(tiny_models.tokenizer(), 320).outer_tokens == ([], [])
    assert ServerVocabulary(None, 320).outer_tokens == ([], [])
