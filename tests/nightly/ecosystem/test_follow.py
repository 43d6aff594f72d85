"""The follower itself: a page that is wrong is found out, with its line."""

import os
import time

import pytest

from tests.nightly.ecosystem.follow import Command, File, NotAsWrittenError, follow, steps

PAGE = """# A page

```console
$ mkdir made && cd made
$ test ! -e note.txt
```

```{code-block} text
:caption: inner/note.txt

one $HOME `two`
  'three'
```

```console
$ cat inner/note.txt
one $HOME `two`
...
$ x=1
$ echo "x is $x"; echo; printf '\\033[32my\\033[0m\\n'
x ... 1

y
```

% by hand
```console
$ exit 3
```

```toml
[not]
followed = true
```
"""


@pytest.fixture
def run(tmp_path):
    def on(text, timeout_s=20.0):
        page = tmp_path / "page.md"
        page.write_text(text)
        folder = tmp_path / "work"
        folder.mkdir()
        follow(page, folder, {"PATH": os.environ["PATH"], "HOME": "/"}, timeout_s=timeout_s)
        return folder

    return on


def test_files_are_written_and_commands_run_in_one_session(run):
    folder = run(PAGE)
    assert (folder / "made/inner/note.txt").read_text() == "one $HOME `two`\n  'three'\n"


def test_steps_know_their_lines():
    found = steps(PAGE)
    assert [type(step) for step in found] == [Command, Command, File, Command, Command, Command]
    assert [step.line for step in found] == [4, 5, 9, 16, 19, 20]
    assert found[3].printed == ("one $HOME `two`", "...")
    assert found[4].printed is None
    assert PAGE.splitlines()[found[5].line - 1].startswith('$ echo "x is')


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("$ x=1", "$ false", r"page\.md:19: \$ false\nexit code 1"),
        ("x ... 1", "x ... 2", r"page\.md:20: .*the page says that it prints:\nx \.\.\. 2\n\ny\nit printed:\nx is 1"),
        ("\ny\n```", "\n```", r"page\.md:20: .*the page says"),
        ("$ x=1", "$ cat nowhere | true", r"page\.md:19: .*nowhere.*\nexit code 1"),
        ('"x is $x"', '"x is $y"', r"page\.md:20: .*y: unbound variable"),
    ],
)
def test_a_page_that_is_wrong_is_found_out(run, old, new, message):
    with pytest.raises(NotAsWrittenError, match=f"(?s){message}"):
        run(PAGE.replace(old, new))


def test_a_session_that_takes_too_long_is_ended_with_what_it_started(run, tmp_path):
    page = PAGE.replace("$ x=1", "$ (sleep 6; touch ../late.txt) & sleep 60")
    with pytest.raises(NotAsWrittenError, match=r"(?s)page\.md:19: .*sleep 60.*all of it took longer than 3 s"):
        run(page, timeout_s=3.0)
    time.sleep(4.0)
    assert not (tmp_path / "work" / "late.txt").exists()


def test_a_page_without_steps_is_no_success(run):
    with pytest.raises(NotAsWrittenError, match="nothing to follow"):
        run("# Empty\n")
