"""All datasets of the package keep the protocol of datasets."""

import attrs
import pytest

from cosmos_core.testing import DatasetConformance


class TestFolder(DatasetConformance):
    plugin = "world-folder"
    num_rows = 6

    @pytest.fixture
    def options(self, tmp_path, clips):
        for number in range(6):
            clips.write_clip(tmp_path / "clips", f"clip{number}", f"scene {number}", frames=2, shade=number)
        (tmp_path / "clips" / "metas" / "clip4.txt").unlink()
        return {"train": "clips", "heldout_rows": 2, "on_bad_row": "skip", "given": "frames"}


class TestTars(DatasetConformance):
    plugin = "world-webdataset"
    num_rows = 6

    @pytest.fixture
    def options(self, tmp_path, clips):
        for shard in range(2):
            captions = {f"c{shard}{number}": f"scene {shard} {number}" for number in range(3)}
            clips.write_tar(tmp_path / f"{shard:02}.tar", captions, frames=2)
        clips.write_tar(tmp_path / "held.tar", {"h": "another scene", "i": "a last one"}, frames=2)
        return {"train": "{00..01}.tar", "heldout": "held.tar"}


@pytest.mark.nightly
class TestLines(DatasetConformance):
    plugin = "world-prompts"

    @pytest.fixture
    def options(self, tmp_path):
        (tmp_path / "prompts.txt").write_text("".join(f"a cat of {n} kg\n\n" for n in range(40)))
        return {"train": "prompts.txt", "heldout_rows": 8}

    @pytest.fixture
    def capabilities(self, provider):
        # A text file has no references; TestRows has.
        return attrs.evolve(provider.capabilities, references=False)


class TestRows(DatasetConformance):
    plugin = "world-prompts"

    @pytest.fixture
    def options(self, tmp_path):
        (tmp_path / "first.png").write_bytes(b"picture")
        rows = "".join(f'{{"prompt": "cat {n}", "colour": "red", "image": "first.png"}}\n' for n in range(40))
        (tmp_path / "prompts.jsonl").write_text(rows)
        return {"train": "prompts.jsonl", "heldout_rows": 8, "reference": "colour", "media": "image"}


class TestMock(DatasetConformance):
    plugin = "world-mock"

    @pytest.fixture
    def options(self):
        return {"given_frames": 1}
