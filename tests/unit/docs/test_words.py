"""The tree speaks the field's words (docs/glossary.md); names of our own that it once had do not come back."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
NOWHERE = (
    "lifeline|usher|patrol|nursery|kinship|foresight|outlook|canvas|chronicle|petition|tallies|vitals|rehearsal|beforehand"
    "|rewind"
)
NO_NAME = (
    "door|desk|keeper|account|claim|standing|opinion|lanes?|cells?|box|boxes|shallow|sight|seeing|entering|looking|asking"
    "|conversation|book"
)
# A table of Markdown has cells.
FINE = {"_cell"}
HISTORY = ("docs/decisions/", "CHANGELOG.md", "tests/unit/docs/test_words.py", "cosmos_core/control/page/assets/")


def sources(*endings):
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [
        path for path in listed if path.endswith(endings) and not path.startswith(HISTORY) and (ROOT / path).exists()
    ]


def parts_of(name):
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def names_of(path):
    yield Path(path).stem
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def test_words_of_our_own_are_nowhere():
    coined = re.compile(rf"\b({NOWHERE})s?\b", re.IGNORECASE)
    found = []
    for path in sources(".py", ".md", ".toml", ".html", ".j2"):
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            found += [f"{path}:{number}: {word}" for word in coined.findall(line)]
    assert not found, f"say it in the words of docs/glossary.md: {found}"


def test_nothing_is_named_with_a_word_of_our_own():
    coined = re.compile(f"({NO_NAME}|{NOWHERE})")
    product = [path for path in sources(".py") if "/tests/" not in path and not path.startswith("tests/")]
    found = [
        f"{path}: {name}"
        for path in product
        for name in names_of(path)
        if name not in FINE and any(coined.fullmatch(part) for part in parts_of(name))
    ]
    assert not found, f"name it in the words of docs/glossary.md: {found}"


def test_few_docstrings_open_with_a_riddle():
    opening = re.compile(r"(What|Which|Who|Whether|How|From)\b")
    said = []
    for path in sources(".py"):
        if path.startswith("cosmos_core/"):
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    said += filter(None, [ast.get_docstring(node)])
    riddles = [text.splitlines()[0] for text in said if opening.match(text)]
    assert len(riddles) < 0.03 * len(said), f"{len(riddles)} of {len(said)} docstrings say no subject: {riddles}"
