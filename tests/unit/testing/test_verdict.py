import pytest

from cosmos_core.testing.check.verdict import Check, Environment, Finding, Verdict, plain, text

GOOD = Check("metadata", "Apache-2.0", (Finding("note", "a word"),))
WARNED = Check("reward short, protocol", "version 1", (Finding("warning", "old"),))
GAP = Check("reward short, kit", "", (Finding("not run", "give an option"),))
BAD = Check("files", "", (Finding("fault", "first\nsecond"), Finding("warning", "less"), Finding("fault", "other")))


def verdict(*checks):
    using = Environment(core="0.1.0", python="3.11.7", torch="2.13.0", platform="Linux x86_64")
    return Verdict(
        distribution="acme 1.0", plugins=("reward short",), date="2026-01-02", environment=using, checks=checks
    )


PASTED = """\
acme 1.0: reward short

Checked 2026-01-02 with cosmos-core 0.1.0, Python 3.11.7, torch 2.13.0, Linux x86_64.

- ok       metadata: Apache-2.0
  - note: a word
- FAULT    files
  - fault: first
    second
  - warning: less
  - fault: other

FAILED: 2 faults"""


def test_a_verdict_is_a_list_to_paste():
    assert text(verdict(GOOD, BAD)) == PASTED


@pytest.mark.parametrize(
    ("checks", "last"),
    [
        ([GOOD], "PASSED"),
        ([GOOD, WARNED], "PASSED"),
        ([GOOD, GAP], "INCOMPLETE: 1 check not run"),
        ([GAP, WARNED, GAP], "INCOMPLETE: 2 checks not run"),
        ([BAD, GAP], "FAILED: 2 faults"),
        ([Check("kit", "", (Finding("fault", "x"),))], "FAILED: 1 fault"),
    ],
)
def test_the_last_line_is_the_outcome(checks, last):
    assert text(verdict(*checks)).splitlines()[-1] == last
    assert last.startswith(plain(verdict(*checks))["outcome"])


def test_a_long_message_is_cut():
    shown = text(verdict(Check("kit", "", (Finding("fault", "\n".join(map(str, range(40)))),))))
    assert "    … and 27 more lines" in shown.splitlines()
