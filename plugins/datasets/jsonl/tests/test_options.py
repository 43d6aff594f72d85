"""Options that contradict one another are refused before any file is read."""

import re

import pytest

from cosmos_dataset_jsonl import JsonlOptions


def test_contradictions(subtests):
    for bad, message in [
        ({}, "give either `prompt`"),
        ({"prompt": "{q}", "messages": "m"}, "give either `prompt`"),
        ({"prompt": "{q}", "heldout": "x", "heldout_rows": 2}, "at most one of"),
        ({"prompt": "{q}", "reference_pattern": "x"}, "needs `reference`"),
        ({"prompt": "{q}", "system": "s"}, "needs `chat = true`"),
        ({"prompt": "{}"}, "name of a field"),
        ({"prompt": "{q:>10}"}, "name of a field"),
        ({"prompt": "{q!r}"}, "name of a field"),
        ({"prompt": "{q"}, "prompt: "),
        ({"prompt": "{q}", "reference": "a", "reference_pattern": "("}, "no regular expression"),
        ({"prompt": "{q}", "heldout_fraction": 1.0}, "heldout_fraction"),
        ({"prompt": "{q}", "heldout_rows": 0}, "heldout_rows"),
        ({"prompt": "{q}", "heldout_rows": 2, "heldout_fraction": 0.5}, "at most one of"),
        ({"prompt": "{q}", "rejected": "{w}"}, "`rejected` needs `demonstration`"),
        ({"prompt": "{q}", "tools": "t"}, "`tools` needs `chat = true`"),
        ({"prompt": "{q}", "demonstration": "{a}", "rejected_messages": "w"}, "needs `messages`"),
        ({"messages": "m", "rejected": "{w}", "rejected_messages": "w"}, "at most one of `rejected`"),
        ({"prompt": "{q}", "on_bad_row": "skip", "check_rows": "when-read"}, 'needs `check_rows = "at-start"`'),
        ({"prompt": "{q}", "max_characters": 9, "check_rows": "when-read"}, 'need `check_rows = "at-start"`'),
        ({"prompt": "{q}", "min_characters": 9, "max_characters": 8}, "`min_characters` is 9, more than"),
    ]:
        with subtests.test(bad=bad, message=message), pytest.raises(ValueError, match=re.escape(message)):
            JsonlOptions(train="x.jsonl", **bad)
