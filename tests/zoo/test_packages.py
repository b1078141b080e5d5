"""Which packages the built-in models may learn from, and which of their files."""

import itertools
import random
from email.message import Message
from importlib.metadata import Distribution

import numpy as np
import pytest

from foredraft import ForedraftError
from foredraft.zoo.corpus import SourceFile
from foredraft.zoo_training.collect import SUMMARY_FILE, TRAIN_FILE, collect
from foredraft.zoo_training.duplicates import DuplicateFilter
from foredraft.zoo_training.licences import find_permissive_licence
from foredraft.zoo_training.packages import Package, cap_shares, find_packages, is_usable_source, strip_licence

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda sigma omega parse write read merge".split()


def code(seed, functions=20):
    """Python text that no other seed repeats."""
    rng = random.Random(seed)
    made = []
    for number in range(functions):
        a, b, c = rng.sample(WORDS, 3)
        made.append(
            f"def {a}_{b}_{seed}_{number}({c}):\n    {a}_value = {b}_{seed}({c}, {number})\n    return {a}_value\n"
        )
    return "\n".join(made)


@pytest.fixture
def installed(tmp_path):
    """Makes a distribution on disk from its metadata and files, as an installer leaves it."""

    def make(name, files, *fields):
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.2", *fields]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
        return Distribution.at(info)

    return make


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License-Expression": "MIT"}, "MIT"),
        ({"License-Expression": "Apache-2.0 OR BSD-2-Clause"}, "Apache-2.0 OR BSD-2-Clause"),
        ({"License-Expression": "MIT OR GPL-3.0-only"}, "MIT OR GPL-3.0-only"),
        ({"License-Expression": "MIT AND GPL-3.0-only"}, None),
        ({"License-Expression": "MIT AND (GPL-3.0-only OR ISC)"}, "MIT AND (GPL-3.0-only OR ISC)"),
        ({"License-Expression": "Apache-2.0 WITH LLVM-exception"}, "Apache-2.0 WITH LLVM-exception"),
        ({"License-Expression": "LGPL-2.1-or-later"}, None),
        ({"License-Expression": "MPL-2.0", "License": "MIT"}, None),
        ({"License-Expression": ""}, None),
        ({"Classifier": "License :: OSI Approved :: BSD License", "License": "Copyright (c) 2001"}, "BSD"),
        ({"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)", "License": "MIT"}, None),
        ({"License": "Apache 2.0 License"}, "Apache-2.0"),
        ({"License": "Proprietary"}, None),
        ({}, None),
    ],
)
def test_only_permissive_licences_are_allowed(fields, licence):
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    assert find_permissive_licence(metadata) == licence


def test_of_two_classifiers_both_have_to_be_allowed():
    metadata = Message()
    metadata["Classifier"] = "License :: OSI Approved :: MIT License"
    metadata["Classifier"] = "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"
    assert find_permissive_licence(metadata) is None


def test_packages_come_by_name_with_version_licence_and_digest(installed):
    files = {"beta/b.py": code(1), "beta/a.py": code(2), "beta/_vendor/other.py": code(3), "beta/data.txt": code(4)}
    made = [
        installed("Beta_pkg", files, "License-Expression: MIT"),
        installed("copyleft", {"copyleft.py": code(5)}, "License-Expression: GPL-3.0-only"),
        installed("alpha", {"alpha.py": code(6)}, "License: BSD"),
        installed("empty", {}, "License-Expression: MIT"),
    ]
    alpha, beta = find_packages(made)
    assert (alpha.name, alpha.version, alpha.licence) == ("alpha", "1.2", "BSD")
    assert beta.name == "beta-pkg"
    assert [file.name for file in beta.files] == ["beta/a.py", "beta/b.py"]
    assert beta.describe() == next(p for p in find_packages(reversed(made)) if p.name == "beta-pkg").describe()
    assert beta.describe()["chars"] == len(code(1)) + len(code(2))


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n",
        "# This file was automatically generated from a template.\n" + code(1),
        '"""Tables. DO NOT EDIT."""\n' + code(1),
        "DATA = '" + "a word " * 200 + "'\n" + code(1),
        "".join(f"    (0x{i:04x}, {i * i}, {i + 7}),\n" for i in range(300)),
        "".join("    'the same line of words',\n" for _ in range(300)),
        code(1) * 500,
    ],
    ids=["short", "generated", "not to be edited", "long line", "numbers", "repeated lines", "long"],
)
def test_tables_and_machine_written_files_are_skipped(text):
    assert is_usable_source(code(1))
    assert not is_usable_source(text)


def test_a_licence_at_the_top_is_cut_and_other_comments_are_not():
    body = "# What this is for.\n" + code(1)
    assert strip_licence("# Copyright 2020 The Authors.\n# Licensed under the Apache License.\n\n" + code(1)) == code(1)
    assert strip_licence(body) == body


def test_what_was_seen_and_what_is_held_out_are_left_out():
    held, seen, new = (SourceFile(f"{name}.py", code(seed)) for seed, name in enumerate(["held", "seen", "new"]))
    half = new.text[: len(new.text) // 2]
    sieve = DuplicateFilter([held])
    sieve.add([seen])
    kept = sieve.select_new(
        [
            SourceFile("copy.py", seen.text + code(9, 4)),
            new,
            SourceFile("again.py", half),
            # a third of a held-out file inside a much longer one
            SourceFile("close.py", code(10, 100) + held.text[: len(held.text) // 2]),
            SourceFile("mixed.py", code(11) + seen.text[: len(seen.text) // 5]),
        ]
    )
    assert [file.name for file in kept] == ["new.py", "mixed.py"]


def package(name, files, start=0):
    texts = (SourceFile(f"{name}/{i}.py", code(start + i)) for i in range(files))
    return Package(name, "1", "MIT", tuple(texts))


def test_no_package_has_more_than_its_share():
    every = [package("large", 60), package("small", 12, 100), package("other", 12, 200)]
    found = cap_shares(every, other_chars=4 * every[1].chars, share=0.25)
    total = 4 * every[1].chars + sum(p.chars for p in found)
    assert 0.2 * total < found[0].chars < 0.26 * total
    assert found[1:] == every[1:]
    assert [f.name for f in found[0].files] == [f.name for f in every[0].files if f in found[0].files]
    assert cap_shares(every, 4 * every[1].chars, 0.25) == found


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "lib"
    root.mkdir()
    for number, name in enumerate(["one", "two", "three", "four", "heapq"]):
        (root / f"{name}.py").write_text(code(300 + number))
    return root


def test_a_corpus_is_gathered_once_and_kept(tree, tmp_path):
    (out := tmp_path / "out").mkdir()
    found = [package("alpha", 1), package("rich", 2, 50)]
    first = collect(out, tree, found)
    about = first.summary
    assert [facts["name"] for facts in about.packages] == ["alpha"]
    assert [facts["name"] for facts in about.held_packages] == ["rich"]
    assert len(first.train) == about.train_tokens > about.library_tokens == len(first.library)
    assert (first.train == 0).sum() == 5
    assert (first.held_out == 0).sum() == 1
    assert about.held_bytes == len(code(304).encode())
    again = collect(out, tree, [])  # what is installed now does not matter
    assert again.summary == about
    assert np.array_equal(again.train, first.train)


def test_another_tree_stands_alone(tree, tmp_path):
    (out := tmp_path / "out").mkdir()
    assert collect(out, tree).summary.packages == ()


def test_an_array_that_has_changed_is_refused(tree, tmp_path):
    (out := tmp_path / "out").mkdir()
    ids = collect(out, tree).train
    np.save(out / TRAIN_FILE, ids[::-1])
    with pytest.raises(ForedraftError, match=f"remove {SUMMARY_FILE} to collect it again"):
        collect(out, tree)


def test_the_environment_gives_the_same_packages_each_time():
    first, second = (list(itertools.islice(find_packages(), 3)) for _ in range(2))
    assert first == second
    assert all(p.files and p.licence for p in first)
