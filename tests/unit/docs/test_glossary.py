"""The glossary is short, says each term once, in four cells, and has only words that the code uses."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def plain(text):
    return re.sub(r"[\W_]+", " ", text).lower()


def test_the_glossary_has_some_forty_terms_that_the_code_uses():
    lines = (ROOT / "docs/glossary.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    rows = [row for row in rows if row[0] != "term" and set(row[0]) != {"-"}]
    terms = [row[0] for row in rows]
    assert [row for row in rows if len(row) != 4 or not all(row)] == []
    assert len(set(terms)) == len(terms)
    assert 35 <= len(terms) <= 45
    read = [*(ROOT / "cosmos_core").rglob("*.py"), ROOT / "docs/architecture.md"]
    used = plain("\n".join(path.read_text() for path in read))
    assert [term for term in terms if not re.search(rf"\b{plain(term).removesuffix('s')}s?\b", used)] == []
