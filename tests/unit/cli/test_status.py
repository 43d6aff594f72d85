import pytest

from cosmos_core.cli import main as cli


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_ctrl_c_ends_the_watching_only(capsys, monkeypatch, tmp_path):
    def interrupt(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("cosmos_core.run.watch.watch", interrupt)
    code, out, err = call(capsys, "status", str(tmp_path), "--watch")
    assert (code, out) == (0, "")
    assert err == f"No longer watching; {tmp_path} goes on.\n"


def test_what_is_no_run_is_one_line(capsys, tmp_path):
    for more in [(), ("--watch",)]:
        code, out, err = call(capsys, "status", str(tmp_path), *more)
        assert (code, out) == (2, "")
        assert err.startswith("cosmos: ")
        assert len(err.splitlines()) == 1
