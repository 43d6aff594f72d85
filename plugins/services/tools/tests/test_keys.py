"""`cosmos keys`: what it makes and says, and that it never prints a secret."""

import pytest

from cosmos_core.cli import main as cli
from cosmos_core.transport.keys import read_key


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(("keys", *arguments))
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_keys_are_made_listed_revoked_and_allowed_again(capsys, tmp_path):
    folder = tmp_path / "keys"
    printed = []
    code, out, _ = call(capsys, "new", str(folder), "--rollout", "gpu7-*", "--person", "ann", "--observer", "wall")
    printed.append(out)
    assert code == 0
    assert {path.stem for path in folder.glob("*.key")} == {"controller", "gpu7", "ann", "wall"}
    assert f'--set control.keys="{folder}"' in out
    assert call(capsys, "revoke", str(folder), "ann")[0] == 0
    code, out, _ = call(capsys, "list", str(folder))
    printed.append(out)
    assert [line.split()[:3] for line in out.splitlines()] == [["gpu7", "rollout", "gpu7-*"], ["wall", "observer", "-"]]
    assert call(capsys, "allow", str(folder), "ann")[0] == 0
    public = read_key(folder / "ann.key").pair.public
    assert call(capsys, "allow", str(folder), "bob", "--role", "person", "--public", public)[0] == 0
    assert public in call(capsys, "list", str(folder))[1]
    for path in folder.glob("*.key"):
        assert not any(read_key(path).pair.secret in text for text in printed)


def test_errors_are_one_line(capsys, tmp_path):
    for arguments, words in [
        (("revoke", "nobody"), "nobody is not in it"),
        (("allow", "nobody"), "no such key"),
        (("list",), "no such allow-list"),
        (("new", "--person", "a/b"), "is no name"),
    ]:
        (tmp_path / "keys").mkdir(exist_ok=True)
        command, *rest = arguments
        code, _, complaint = call(capsys, command, str(tmp_path / "keys"), *rest)
        assert code == 2
        assert words in complaint
        assert len(complaint.splitlines()) == 1
