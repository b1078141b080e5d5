"""The writer of YAML, against a reader of YAML."""

import yaml
from hypothesis import given
from hypothesis import strategies as st

from foredraft.handover.text import to_comments, to_yaml

SCALARS = st.one_of(
    st.integers(-(10**9), 10**9),
    st.booleans(),
    st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF)),
    st.none(),
)
KEYS = st.from_regex(r"[a-z_][a-zA-Z_.]{0,8}", fullmatch=True).map(lambda key: f"k{key}")
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=5))
def test_what_is_written_is_read_back(value):
    assert yaml.safe_load(to_yaml(value)) == value


def test_several_lines_are_a_block():
    text = to_yaml({"a": [{"b": "x: 1\n- y\n", "c": 2}]})
    assert text == "a:\n  - b: |\n      x: 1\n      - y\n    c: 2\n"
    assert yaml.safe_load(text) == {"a": [{"b": "x: 1\n- y\n", "c": 2}]}


def test_a_comment_is_one_line():
    assert to_comments(["a\nb", "c"]) == "# a b\n# c\n"
