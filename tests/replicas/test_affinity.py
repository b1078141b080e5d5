"""Choice of a replica: sessions stay, prefixes find their cache, and load wins over both."""

import json

import pytest

from foredraft.replicas.affinity import (
    BLOCK_CHARS,
    LOAD_SLACK,
    MAX_ENTRIES,
    AffinityKey,
    AffinityRouter,
    Choice,
    make_replica_tag,
)
from foredraft.replicas.affinity import read_affinity_key as read

IDLE = {"a": 0, "b": 0, "c": 0}
LONG = "x" * BLOCK_CHARS


def key_of(**body) -> AffinityKey:
    return read([], json.dumps(body).encode())


def session(name: str) -> AffinityKey:
    return AffinityKey(session=name)


def test_a_session_keeps_its_replica_while_others_come_and_go():
    """Fault: a hash modulo the number of replicas moves nearly every session when one is added."""
    before = {name: AffinityRouter().choose(session(name), IDLE).replica for name in map(str, range(300))}
    assert {list(before.values()).count(replica) > 50 for replica in IDLE} == {True}
    fewer, more = {"a": 0, "b": 0}, IDLE | {"d": 0}
    for name, replica in before.items():
        if replica != "c":
            assert AffinityRouter().choose(session(name), fewer).replica == replica
        assert AffinityRouter().choose(session(name), more).replica in (replica, "d")


def test_two_fronts_choose_the_same_replica_of_a_session():
    one, other = AffinityRouter(), AffinityRouter()
    for number in range(20):
        other.choose(AffinityKey(), IDLE)  # a different history
        assert one.choose(session(str(number)), IDLE) == other.choose(session(str(number)), IDLE)


def test_a_session_of_an_overloaded_replica_goes_elsewhere_and_comes_back():
    router = AffinityRouter()
    home = router.choose(session("s"), IDLE).replica
    assert router.choose(session("s"), IDLE | {home: LOAD_SLACK}) == Choice(home, "session")
    assert router.choose(session("s"), IDLE | {home: LOAD_SLACK + 1}).replica != home
    assert router.choose(session("s"), IDLE).replica == home


def test_a_prompt_goes_to_the_replica_that_holds_its_beginning():
    router = AffinityRouter()
    first = router.choose(key_of(prompt=LONG + LONG), IDLE)
    assert first.reason == "load"
    longer = router.choose(key_of(prompt=LONG + LONG + "y" * BLOCK_CHARS), IDLE | {first.replica: 2})
    assert longer == Choice(first.replica, "prefix")
    assert router.choose(key_of(prompt="z" + LONG + LONG), IDLE | {first.replica: 2}).replica != first.replica


def test_a_turn_of_a_chat_goes_where_the_earlier_turns_were():
    router = AffinityRouter()
    messages = [{"role": "user", "content": LONG * 2}]
    home = router.choose(key_of(messages=messages), IDLE).replica
    messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and then?"}]
    assert router.choose(key_of(messages=messages), IDLE | {home: 3}) == Choice(home, "prefix")


def test_a_common_beginning_is_no_reason_to_fill_one_replica():
    """Fault: with one system prompt for all, every request went to the same replica."""
    router, loads = AffinityRouter(), dict.fromkeys(IDLE, 0)
    for _ in range(60):
        loads[router.choose(key_of(prompt=LONG * 4), loads).replica] += 1
    assert max(loads.values()) <= 1.5 * min(loads.values()) + LOAD_SLACK + 1
    assert min(loads.values()) >= 10


def test_a_small_common_part_does_not_decide():
    router = AffinityRouter()
    home = router.choose(key_of(prompt=LONG), IDLE).replica
    chosen = router.choose(key_of(prompt=LONG + "y" * 5 * BLOCK_CHARS), IDLE | {home: 1})
    assert (chosen.reason, chosen.replica == home) == ("load", False)


def test_without_affinity_the_requests_go_round():
    router = AffinityRouter()
    assert sorted(router.choose(AffinityKey(), IDLE).replica for _ in range(6)) == ["a", "a", "b", "b", "c", "c"]
    assert router.choose(AffinityKey(), {"a": 3, "b": 2, "c": 9}) == Choice("b", "load")


def test_a_replica_that_has_gone_holds_nothing():
    router = AffinityRouter()
    home = router.choose(key_of(prompt=LONG), IDLE).replica
    router.forget(home)
    assert router.choose(key_of(prompt=LONG), IDLE).reason == "load"


def test_the_table_does_not_grow_without_end():
    router = AffinityRouter()
    blocks = tuple(number.to_bytes(8, "big") for number in range(MAX_ENTRIES + 9))
    router.choose(AffinityKey(blocks=blocks), IDLE)
    assert len(router._holders) == MAX_ENTRIES


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"7", b'{"prompt": "short"}', b'{"prompt": null}', b"[" * 100_000, b'{"prompt": ""}', b"\xff"],
)
def test_a_body_without_a_prompt_has_no_blocks(body: bytes):
    assert read([], body) == AffinityKey()


def test_caches_that_are_salted_differently_are_not_shared():
    assert key_of(prompt=LONG) != key_of(prompt=LONG, cache_salt="mine")
    assert key_of(prompt=LONG) == key_of(max_tokens=3, prompt=LONG)


def test_token_ids_and_lone_surrogates_are_hashed():
    assert len(key_of(prompt=list(range(100))).blocks) > 1
    assert len(key_of(prompt="\ud800" + LONG).blocks) == 1


def test_the_header_names_the_session():
    headers = [(b"host", b"x"), (b"x-session-id", b"me")]
    assert read(headers, b'{"prompt": "a"}') == AffinityKey(session="me")
    assert read([(b"x-session-id", b"")], b"") == AffinityKey()


def test_the_id_of_a_response_names_its_replica():
    """Ids stand in the path or in the body, which may be too long to parse."""
    tag = make_replica_tag("10.0.0.1", 4000)
    name = f"resp_{tag}0123"
    path = "/v1/responses"
    assert tag != make_replica_tag("10.0.0.1", 4001)
    assert read([], b"", f"{path}/{name}/input_items").replica_tag == tag
    for filler in ("a", "a" * (1 << 20)):
        body = json.dumps({"input": filler, "previous_response_id": name}).encode()
        assert read([], body, path).replica_tag == tag
    for body, other in (({"previous_response_id": name}, "/v1/completions"), ({"input": json.dumps(
        {"previous_response_id": name})}, path), ({"previous_response_id": "resp_x"}, path)):  # fmt: skip
        assert read([], json.dumps(body).encode(), other).replica_tag is None


def test_responses_have_sessions_and_prefixes_too():
    assert key_of(input="a", prompt_cache_key="thread").session == "thread"
    assert len(key_of(input=LONG, instructions=LONG).blocks) > 1
    assert key_of(input=LONG, instructions=LONG).blocks[0] == key_of(input="b", instructions=LONG).blocks[0]
