import json
import logging
import warnings

import pytest

from cosmos_core.observe import logs


@pytest.fixture(autouse=True)
def _restore():
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield
    for handler in [*root.handlers]:
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_json_lines_and_warnings_are_plain_on_stderr(tmp_path, capsys):
    path = tmp_path / "logs" / "policy-0.jsonl"
    logs.setup(path, "policy-0")
    logger = logging.getLogger("cosmos_core.test")
    logger.debug("unseen")
    logger.info("step %d", 3)
    logger.warning("zwei\nZeilen")
    first, second = read(path)
    assert (first["level"], first["logger"], first["message"]) == ("INFO", "cosmos_core.test", "step 3")
    assert first["time"].endswith("+00:00")
    assert second["message"] == "zwei\nZeilen"
    assert capsys.readouterr().err == "policy-0: WARNING: zwei\nZeilen\n"

    # A text that utf 8 cannot hold is logged nevertheless.
    path = tmp_path / "a.jsonl"
    logs.setup(path, "a")
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "file %s", ("\ud800.png",), None)
    for handler in logging.getLogger().handlers:
        # Not by a logger: pytest would keep the text, which it cannot print either.
        if isinstance(handler.formatter, logs.JsonLines):
            handler.handle(record)
    (entry,) = read(path)
    assert entry["message"] == "file \ud800.png"
    assert not capsys.readouterr().err


def test_a_traceback_goes_to_the_file_only(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    logs.setup(path, "a")
    try:
        raise ValueError("broken")  # noqa: TRY301
    except ValueError:
        logging.getLogger("x").exception("it failed")
    (entry,) = read(path)
    assert "ValueError: broken" in entry["exception"]
    assert "Traceback" in entry["exception"]
    assert capsys.readouterr().err == "a: ERROR: it failed\n"


def test_python_warnings_are_logged_and_a_second_setup_goes_on(tmp_path):
    # A second setup replaces the first and the file is appended to.
    logs.setup(tmp_path / "a.jsonl", "a")
    logging.getLogger("x").info("one")
    logs.setup(tmp_path / "a.jsonl", "a")
    logging.getLogger("x").info("two")
    assert [entry["message"] for entry in read(tmp_path / "a.jsonl")] == ["one", "two"]

    # Python warnings are logged.
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    assert "old thing" in read(tmp_path / "a.jsonl")[-1]["message"]
