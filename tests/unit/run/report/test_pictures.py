"""Frames of held-out samples in the report."""

import attrs
from PIL import Image

from cosmos_core.control.machine.records import EvaluationRecord, HeldOutCompletion
from cosmos_core.run.follower import Follower
from cosmos_core.run.report.page import Album, contact_sheet, write_report
from cosmos_core.run.report.summary import summarise
from cosmos_core.run.supervisor import Ending
from cosmos_core.types import Prompt


class Rows:
    def size(self, split):
        return 5

    def row(self, split, index):
        return Prompt(text=f"prompt {index}")


def strip(directory, version, row, *, size=(8, 4)):
    path = directory / f"media/step-{version}/row-{row}.strip.webp"
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (10 * version, 20 * row, 0)).save(path, lossless=True)
    return f"media/step-{version}/row-{row}.mp4"


def record(version, media):
    completions = tuple(HeldOutCompletion(row=row, text="", reward=0.5, media=place) for row, place in enumerate(media))
    return EvaluationRecord(
        version=version,
        accuracy=0.5,
        reward=0.5,
        num_prompts=len(media),
        num_unscored=0,
        num_truncated=0,
        completions=completions,
    )


def test_frames_before_and_after_stand_side_by_side(job, finished):
    follower = Follower()
    follower.fold(finished.entries)
    job.directory.mkdir()
    evaluations = [done for done in follower.evaluations if done.accuracy is not None]
    for done in evaluations:
        version = done.version
        kept = tuple(attrs.evolve(each, media=strip(job.directory, version, each.row)) for each in done.completions)
        object.__setattr__(done, "completions", kept)
    page = write_report(job, follower, summarise(job, follower, Ending(outcome="finished"), wall_s=1.0), Rows())
    text = page.read_text()
    first, last = evaluations[0].version, evaluations[-1].version
    before = text.index(f'<a href="media/step-{first}/row-0.mp4"><img class="strip" alt="frames" src="data:image/webp;')
    after = text.index(f'<a href="media/step-{last}/row-0.mp4">')
    assert before < after < text.index("Contact sheet")
    assert text.startswith("<!doctype html>")
    assert text.count("<img") == 2 * 5 + len(evaluations) * 5


def test_pictures_are_of_media_of_the_run_as_long_as_there_is_room(tmp_path, monkeypatch):
    # Nothing but media of the run is shown.
    for place in [
        "",
        "/etc/passwd",
        "media/step-1/../../../x.png",
        "media/step-1/row-0.svg",
        'media/step-1/row-0.png" onload="x',
    ]:
        assert Album(tmp_path).picture(place) is None

    # A strip that is gone leaves the link.
    picture = Album(tmp_path).picture("media/step-1/row-0.mp4")
    assert (picture.file, picture.strip) == ("media/step-1/row-0.mp4", "")

    # The page stays small.
    monkeypatch.setattr("cosmos_core.run.report.page._MOST_BYTES", 100)
    album = Album(tmp_path)
    shown = [album.picture(strip(tmp_path, 1, row)).strip for row in range(6)]
    assert shown[0].startswith("data:image/webp;base64,")
    assert shown[-1] == ""


def test_a_contact_sheet_has_the_first_and_the_last_evaluation(tmp_path):
    records = [record(version, [strip(tmp_path, version, row) for row in range(2)]) for version in range(20)]
    sheet = contact_sheet(records, Album(tmp_path))
    assert len(sheet.versions) == 6
    assert (sheet.versions[0], sheet.versions[-1]) == (0, 19)
    assert [row for row, _ in sheet.rows] == [0, 1]
    assert all(len(pictures) == 6 for _, pictures in sheet.rows)

    # There is none where nothing was rendered.
    assert contact_sheet([record(0, ["", ""])], Album(tmp_path)) is None
    assert contact_sheet([], Album(tmp_path)) is None
