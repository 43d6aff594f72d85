import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.models.weights import loading


@pytest.fixture
def asked(monkeypatch):
    """Names that the hub was asked for; it cannot be reached."""
    names = []

    def ask(url):
        names.append(url)
        raise OSError("Name or service not known")

    monkeypatch.setattr(loading, "get_hf_file_metadata", ask)
    return names


def test_a_path_whose_folder_is_here_is_no_name_on_the_hub(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "arithmetic").mkdir(parents=True)
    loading.require_folder("runs/arithmetic")
    with pytest.raises(ConfigError, match=r"no folder 'runs/arithmetik'; did you mean runs/arithmetic\?"):
        loading.require_folder("runs/arithmetik")
    for path in ("./none", "/none/at/all", "a/b/c"):
        with pytest.raises(ConfigError, match=f"no folder '{path}'$"):
            loading.require_folder(path)
    (tmp_path / "job.json").touch()
    with pytest.raises(ConfigError, match=r"is a run; cosmos export \. writes its model, to export"):
        loading.require_folder(".")
    assert asked == []


def test_a_hub_that_cannot_be_asked_is_told_at_once(asked, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"no folder 'Qwen/Q', and the hub cannot be asked .*service not known"):
        loading.require_folder("Qwen/Q")
    assert len(asked) == 1

    def refuse(url):
        raise ValueError("no such name")

    monkeypatch.setattr(loading, "get_hf_file_metadata", refuse)
    loading.require_folder("Qwen/R")  # who reads its files says what the hub says

    # Of one that was fetched before, the files are there.
    monkeypatch.setattr(loading, "HF_HUB_CACHE", tmp_path)
    (tmp_path / "models--Qwen--S").mkdir()
    monkeypatch.setattr(loading, "get_hf_file_metadata", None)
    loading.require_folder("Qwen/S")
