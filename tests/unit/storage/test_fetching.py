"""Models that are fetched from a store: once, whole, and nowhere else."""

import pytest

from cosmos_core.errors import StorageError
from cosmos_core.storage import fetch_model, send_folder
from cosmos_core.storage.models import LIST
from tests.unit.storage.conftest import URL, contents


def test_it_is_fetched_once_and_again_when_it_changes(store, model, monkeypatch):
    send_folder(model, URL)
    first = fetch_model(URL)
    asked = []
    get = type(store).get_file
    monkeypatch.setattr(
        type(store), "get_file", lambda self, *given, **more: asked.append(given) or get(self, *given, **more)
    )
    assert fetch_model(URL) == first
    assert asked == []
    (model / "a.safetensors").write_text("of another size")
    send_folder(model, URL)
    assert fetch_model(URL) != first
    assert (fetch_model(URL) / "a.safetensors").read_text() == "of another size"


def test_a_model_that_is_replaced_while_it_is_fetched_is_not_kept(store, model, tmp_path, monkeypatch):
    send_folder(model, URL)
    get, replaced = type(store).get_file, []

    def replace_after_the_first(self, *given, **more):
        get(self, *given, **more)
        if not replaced:
            replaced.append(URL)
            (model / "config.json").write_text("CONTENT OF config.json")
            send_folder(model, URL)

    monkeypatch.setattr(type(store), "get_file", replace_after_the_first)
    with pytest.raises(StorageError, match=f"{URL}: it was changed while it was fetched"):
        fetch_model(URL)
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    assert contents(fetch_model(URL)) == contents(model)


def test_a_model_of_links_is_fetched_unless_they_lead_to_folders(store, snapshot, model):
    # A model that is links is fetched.
    assert contents(fetch_model(f"file://{snapshot}")).keys() == contents(snapshot).keys() - {LIST}

    # A link to a folder is no file of a model.
    (snapshot / "text_encoder").symlink_to(model / "transformer")
    with pytest.raises(StorageError, match=r"text_encoder is a link to a folder, of which nothing is copied; put"):
        fetch_model(f"file://{snapshot}")


def test_nothing_is_written_outside_of_the_copy(store, model, monkeypatch):
    send_folder(model, URL)
    find = type(store).find

    def found(self, *given, **more):
        listed = find(self, *given, **more)
        return {**listed, "/models/one/../../../evil": {"size": 1, "type": "file", "name": "evil"}}

    monkeypatch.setattr(type(store), "find", found)
    with pytest.raises(StorageError, match=r"has a file '../../../evil', which would be outside"):
        fetch_model(URL)
