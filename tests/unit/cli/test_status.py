import pytest

from cosmos_core.cli import main as cli


def call(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_watching_ends_with_ctrl_c_and_what_is_no_run_is_one_line(capsys, tmp_path, monkeypatch):
    # What is no run is one line.
    for more in [(), ("--watch",)]:
        code, out, err = call(capsys, "status", str(tmp_path), *more)
        assert (code, out) == (2, "")
        assert err.startswith("cosmos: ")
        assert len(err.splitlines()) == 1

    # Ctrl c ends the watching only.
    def interrupt(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("cosmos_core.run.status.watch", interrupt)
    code, out, err = call(capsys, "status", str(tmp_path), "--watch")
    assert (code, out) == (0, "")
    assert err == f"No longer watching; {tmp_path} goes on.\n"
