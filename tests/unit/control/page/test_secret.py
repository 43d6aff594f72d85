import stat

import pytest

from cosmos_core.control.page.authentication import NAME, run_token
from cosmos_core.errors import TransportError


def test_a_token_is_random_of_its_owner_only_and_kept(tmp_path):
    (tmp_path / "other").mkdir()
    token, other = run_token(tmp_path), run_token(tmp_path / "other")
    assert len(token) == 43
    assert token != other
    path = tmp_path / NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == f"{token}\n"
    assert [found.name for found in tmp_path.iterdir() if found.is_file()] == [NAME]

    assert run_token(tmp_path) == run_token(tmp_path)


def test_what_is_no_token_or_could_have_been_read_is_replaced(tmp_path, subtests):
    for content in ["", "short", "x" * 44, "ä" * 43, "a b" * 20]:
        with subtests.test(content=content):
            path = tmp_path / NAME
            path.write_text(content)
            path.chmod(0o600)
            assert run_token(tmp_path) != content
            assert len(path.read_text()) == 44

    token = run_token(tmp_path)
    (tmp_path / NAME).chmod(0o644)
    assert run_token(tmp_path) != token
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600


def test_a_link_to_elsewhere_is_replaced_and_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("k" * 43)
    elsewhere.chmod(0o600)
    (tmp_path / NAME).symlink_to(elsewhere)
    assert run_token(tmp_path) != "k" * 43
    assert not (tmp_path / NAME).is_symlink()
    assert elsewhere.read_text() == "k" * 43


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    with pytest.raises(TransportError, match=r"page\.token: the page's token cannot be kept"):
        run_token(tmp_path / "absent")
