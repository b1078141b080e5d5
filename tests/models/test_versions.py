"""Releases newer than those that were tested are named, and not shut out."""

import pytest

from foredraft.models.versions import describe_untested, read_installed_versions


def test_the_installed_versions_are_tested_ones():
    assert describe_untested(read_installed_versions()) == []


@pytest.mark.parametrize("version", ["2.14.0", "2.14.0+cpu", "3.0.1", "2.100.0a0"])
def test_a_newer_release_is_named_with_what_to_do(version):
    [sentence] = describe_untested({"torch": version, "transformers": "5.16.0"})
    assert version in sentence
    assert "pip install 'torch==2.13.*'" in sentence


def test_older_releases_and_patches_are_silent():
    assert describe_untested({"torch": "2.13.9", "transformers": "5.2.0"}) == []
