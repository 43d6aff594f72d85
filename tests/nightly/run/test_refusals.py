"""Planning refuses each recipe of the table, and says what `docs/refusals.md` says."""

import itertools

import pytest

from tests import refusals


@pytest.mark.timeout(400)
def test_the_page_of_refusals_is_what_planning_says(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(refusals.ROOT)
    told = list(refusals.page())
    assert told == refusals.PAGE.read_text().splitlines(), "if it shall be so: python -m tests.refusals"
    assert not [line for before, line in itertools.pairwise(told) if not before and not line], "not refused"
