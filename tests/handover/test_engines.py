"""Tables of the engines: complete for the options of `foredraft serve`, and in line with what the methods declare."""

from dataclasses import fields

import pytest

from foredraft.cli.handover import ADDRESS_FIELDS, DRAFTER_FIELDS, LIST_FIELDS
from foredraft.cli.serve import ServeOptions
from foredraft.drafters.registry import load_methods
from foredraft.errors import ForedraftError
from foredraft.handover.engine import EngineDrafter
from foredraft.handover.registry import find_engine, load_engines

ENGINES = load_engines()
SERVER_OPTIONS = {option.name for option in fields(ServeOptions)} - DRAFTER_FIELDS - ADDRESS_FIELDS - LIST_FIELDS
PAIRS = [(name, engine) for name, method in load_methods().items() for engine in method.counterparts]


def test_there_are_the_engines_that_the_documentation_lists():
    assert set(ENGINES) == {"vllm", "sglang", "trtllm", "llama.cpp"}


@pytest.mark.parametrize("name", ENGINES)
def test_every_option_of_the_server_has_an_entry(name):
    """Guards against a new option of `foredraft serve` that a handover drops in silence."""
    assert set(ENGINES[name].flags) == SERVER_OPTIONS


@pytest.mark.parametrize("name", ENGINES)
def test_every_entry_has_a_flag_or_a_reason(name):
    for option, flag in ENGINES[name].flags.items():
        assert flag.is_equal or flag.note, option
        assert flag.flag is None or flag.flag.startswith("--"), option
        assert "\n" not in flag.note
    assert all(image for image in ENGINES[name].images.values())
    assert ENGINES[name].version


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_a_counterpart_is_that_of_an_engine_and_its_format_exists(name, engine):
    method = load_methods()[name]
    counterpart = method.counterparts[engine]
    assert engine in ENGINES
    if counterpart.export is not None:
        assert method.checkpoint.find_export(counterpart.export) is not None
    written = ENGINES[engine].write_drafter(EngineDrafter((counterpart.name,), "folder", 4, counterpart.settings))
    assert written.flags or written.config


def test_an_unknown_engine_is_answered_with_the_names():
    with pytest.raises(ForedraftError, match="did you mean 'sglang'"):
        find_engine("sglan")
