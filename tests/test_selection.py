"""`make test` is a sample of the suite: it has a case of every function. The other commands have all others."""

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Set
from pathlib import Path

import pytest

from foredraft.drafters.registry import load_methods
from foredraft.verification.registry import RULES
from tests.support.library_setups import EMULATED, INSTRUCTION_SETS
from tests.support.sample_table import SAMPLES
from tests.support.selection import (
    COLLECTED,
    MARK,
    REST_SECONDS,
    WIDE_MARK,
    Sample,
    choose_cases,
    get_identifier,
    get_parts,
    group_by_function,
)

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest) -> dict[str, list[pytest.Item]]:
    """Group all collected cases by function. Checks cover the whole suite if the whole suite is collected."""
    return group_by_function(request.config.stash[COLLECTED])


def is_kept(item: pytest.Item) -> bool:
    return item.get_closest_marker(MARK) is None and item.get_closest_marker(WIDE_MARK) is None


def find_absent(groups: dict[str, list[pytest.Item]]) -> list[str]:
    """Find functions without a case in `make test`."""
    return [name for name, cases in groups.items() if not any(map(is_kept, cases))]


def test_every_function_has_a_case_in_make_test_or_is_listed_as_slow(groups) -> None:
    slow = {name for name, sample in SAMPLES.items() if sample.num_kept == 0}
    assert not set(find_absent(groups)) - slow
    assert all(sample.reason for sample in SAMPLES.values() if sample.num_kept == 0)


def test_only_listed_functions_are_sampled(groups) -> None:
    sampled = {name for name, cases in groups.items() if not all(map(is_kept, cases))}
    assert sampled <= set(SAMPLES)
    for name in sampled:
        assert sum(map(is_kept, groups[name])) == SAMPLES[name].num_kept, name


def test_every_file_keeps_cases_in_make_test(groups) -> None:
    kept = {name.partition("::")[0] for name, cases in groups.items() if any(map(is_kept, cases))}
    assert {name.partition("::")[0] for name in groups} == kept


def test_the_list_names_functions_that_exist_and_have_more_cases(groups) -> None:
    """A renamed function would be whole in `make test` again, and its line would stay."""
    files = {name.partition("::")[0] for name in groups}
    for name, sample in SAMPLES.items():
        file = name.partition("::")[0]
        assert (ROOT / file).exists(), name
        if file in files:
            assert name in groups, f"{name} is gone: take it from tests/support/sample_table.py"
            assert sample.num_kept < len(groups[name]), f"{name} has {len(groups[name])} cases: the line has no effect"


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("tests/invariants", {*load_methods(), *RULES}),
        ("tests/verification", RULES.keys()),
        ("tests/kernels", {*INSTRUCTION_SETS, EMULATED}),
        ("tests/models", {*INSTRUCTION_SETS, EMULATED}),
    ],
)
def test_each_method_rule_and_instruction_set_stays_in_make_test(groups, folder: str, names: Set[str]) -> None:
    """Names are parts of the identifiers of a folder's cases."""
    inside = {name: cases for name, cases in groups.items() if name.startswith(f"{folder}/")}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("test_*.py")}
    if {name.partition("::")[0] for name in inside} != files:
        pytest.skip("the folder is not collected whole")
    every, kept = set(), set()
    for case in itertools.chain.from_iterable(inside.values()):
        for found in (every, kept) if is_kept(case) else (every,):
            found |= get_parts(get_identifier(case)) & names
    assert every
    assert every - kept == set()


COLLECT = """
import json, sys, pytest
for expression in json.loads(sys.argv[2]):
    options = ["-m", expression] if expression else []
    pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", sys.argv[1], *options])
    print("END")
"""


def test_the_commands_divide_the_suite() -> None:
    """The commands have no case in common, and together those of `make test-all`."""
    recipe = re.compile(r"^(test\S*):\n\t\$\(PYTHON\) -m pytest -n 2(.*)$", re.MULTILINE)
    options = dict(recipe.findall((ROOT / "Makefile").read_text()))
    names = ["test", "test-rest", "test-wide", "test-all"]
    assert sorted(options) == sorted(names)
    expressions = [options[name].strip().removeprefix("-m ").strip('"') for name in names]
    command = [sys.executable, "-c", COLLECT, "tests/invariants/test_exact_distribution.py", json.dumps(expressions)]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    *parts, whole = (sum(map(int, re.findall(r": (\d+)$", text, re.M))) for text in output.split("END")[:4])
    assert min(parts) > 0, output
    assert sum(parts) == whole


def test_every_case_is_in_one_command(groups) -> None:
    for cases in groups.values():
        for case in cases:
            assert case.get_closest_marker(MARK) is None or case.get_closest_marker(WIDE_MARK) is None


def test_the_rest_of_a_function_has_a_limit() -> None:
    assert Sample(3, 5 * REST_SECONDS).count_rest(10) == 2
    assert Sample(3, REST_SECONDS).count_rest(10) == 7
    assert Sample(1, 7.5 * REST_SECONDS).count_rest(10) == 1
    assert Sample(0, 4 * REST_SECONDS).count_rest(1) == 1  # it runs nowhere else
    assert Sample(1, 4 * REST_SECONDS).count_rest(2) == 0


def test_a_sample_takes_new_parts_first_and_is_the_same_each_time() -> None:
    parts = ("eagle", "medusa", "ngram"), ("match", "reject", "block")
    names = [f"{method}-{rule}" for method in parts[0] for rule in parts[1]]
    chosen = choose_cases(names, 3, Counter())
    assert {part for i in chosen for part in names[i].split("-")} == {*parts[0], *parts[1]}
    assert chosen == choose_cases(names, 3, Counter())
    assert choose_cases(names, 0, Counter()) == set()
    assert choose_cases(names, 99, Counter()) == set(range(9))


def test_functions_of_a_file_take_turns() -> None:
    """Three functions over nine methods keep three cases each: every method stays once."""
    names, num_uses = [f"method{i}" for i in range(9)], Counter()
    chosen = [choose_cases(names, 3, num_uses) for _ in range(3)]
    assert set.union(*chosen) == set(range(9))
