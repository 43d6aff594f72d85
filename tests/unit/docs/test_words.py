"""The tree speaks the field's words (docs/glossary.md); names of our own that it once had do not come back."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NOWHERE = re.compile(
    "(lifeline|usher|patrol|nursery|kinship|foresight|outlook|canvas|chronicle|petition|tally|tallies|vitals|rehearsal"
    "|beforehand|rewind|desk|keeper|lane)s?"
)
NO_NAME = re.compile(
    f"({NOWHERE.pattern}|door|account|book|guard|ring|standing|opinion|entrance|conversation|sight|seeing|entering)s?"
)
# A test's name is a sentence, in which these are plain English.
NO_NAME_OF_THE_PRODUCT = re.compile(f"({NO_NAME.pattern}|claim|cell|boxe?|shallow|looking|asking|against)s?")
FINE = {
    "FigureCanvasSVG",  # matplotlib's
    "canvas",  # an element of HTML
    "_cell",  # of a table of Markdown
    "_box",  # of a slice of a tensor, in the template of engines
    "ring",  # Ring Attention
    "_Ring",
    "test_ring",
    "test_the_main_guard_runs_with_input_and_not_before_asserts",  # `if __name__ == "__main__"`
    "test_its_preflight_says_nothing_against_what_it_does_here",
}
# A decision and an entry of the changelog may say what a thing was called before, as "(they were `Foresight`)".
CALLED_BEFORE = re.compile(r"\(they were [^)]*\)", re.DOTALL)


def sources(*endings):
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    here = Path(__file__).relative_to(ROOT).as_posix()
    return [path for path in listed if path.endswith(endings) and path != here and (ROOT / path).exists()]


def coined(name, words):
    if name in FINE:
        return False
    return any(words.fullmatch(part.lower()) for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name))


def is_test(path):
    return path.startswith("tests/") or "/tests/" in path


def names_of(path):
    text = (ROOT / path).read_text()
    yield Path(path).name.split(".")[0]
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name
    else:
        yield from re.findall(r"\b(?:class|def|function|const|let) (\w+)", text)


@pytest.mark.parametrize(
    ("name", "is_coined"),
    [("needs_no_lifeline", True), ("Tallies", True), ("HTTPKeeper", True), ("TheRewinds", True), ("airplane", False)],
)
def test_names_are_read_part_by_part(name, is_coined):
    assert coined(name, NOWHERE) is is_coined


def test_words_of_our_own_are_nowhere():
    found = []
    for path in sources(".py", ".md", ".toml", ".html", ".j2", ".js", ".css"):
        for paragraph in re.split(r"\n(?=- |\n)", (ROOT / path).read_text()):
            text = CALLED_BEFORE.sub("", paragraph) if path.endswith(".md") else paragraph
            found += [f"{path}: {word}" for word in re.findall(r"\w+", text) if coined(word, NOWHERE)]
    assert not found, f"say it in the words of docs/glossary.md: {found}"


def test_nothing_is_named_with_a_word_of_our_own():
    found = [
        f"{path}: {name}"
        for path in sources(".py", ".j2", ".js")
        for name in names_of(path)
        if coined(name, NO_NAME if is_test(path) else NO_NAME_OF_THE_PRODUCT)
    ]
    assert not found, f"name it in the words of docs/glossary.md: {found}"


def test_decisions_and_changelog_tell_of_things_by_their_names():
    said = re.compile(r"\b(doors?|accounts?|books?|entrances?)\b", re.IGNORECASE)
    found = [
        f"{path}: {word}"
        for path in sources(".md")
        if path.startswith("docs/decisions/") or path == "CHANGELOG.md"
        for word in said.findall((ROOT / path).read_text())
    ]
    assert not found, f"say it in the words of docs/glossary.md: {found}"


def test_no_docstring_opens_with_a_riddle():
    opening = re.compile(r"(Wh(at|ich|o|om|ose|ether|ere|y)|How|From|Of|As|Those|That of|Its|Until)\b")
    said = []
    for path in sources(".py"):
        if path.startswith("cosmos_core/"):
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    said += filter(None, [ast.get_docstring(node)])
    riddles = [text.splitlines()[0] for text in said if opening.match(text)]
    assert not riddles, f"say what it is, returns or does: {riddles}"
