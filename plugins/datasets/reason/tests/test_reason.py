"""Questions as prompts, the labels of the ontologies, and rows that are refused or counted."""

import json
import re
import subprocess
import sys

import pytest

from cosmos_core.errors import DataError
from cosmos_core.plugins.selection import PluginSet
from cosmos_core.protocols import Completion, DatasetContext, RewardContext
from cosmos_core.types import Message
from cosmos_dataset_reason import CAPABILITIES, COMMON_SENSE, EMBODIMENTS, ReasonDataset, ReasonOptions, levels
from cosmos_dataset_reason.ontology import LABELS

ROW = {
    "video": "film.mp4",
    "question": "What happens next?",
    "choices": {"A": "It falls.", "B": "It stays."},
    "answer": "B",
    "label": "physics/mechanics",
}

SYSTEM = "You see."
ASKED = "What happens next?"


def talk(*contents):
    """A row of a conversation; one of three turns begins with the system's."""
    roles = ("system", "user", "assistant") if len(contents) == 3 else ("user", "assistant")
    turns = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return {"video": "film.mp4", "conversations": turns}


def read(folder, *rows, **options):
    (folder / "film.mp4").write_bytes(b"film")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ReasonDataset(ReasonOptions(train="rows.jsonl", **options), DatasetContext(seed=0, directory=folder))


def test_the_ontologies_have_what_the_paper_lists():
    assert sum(len(each) for each in COMMON_SENSE.values()) == 16
    assert (len(CAPABILITIES), len(EMBODIMENTS), len(LABELS)) == (4, 5, 16 + 4 + 20)


def test_levels_of_a_label():
    assert levels("space/affordance") == ["space", "space/affordance"]
    assert levels("embodied/predict-action-effects/robot-arm") == [
        "embodied",
        "embodied/predict-action-effects",
        "embodied/predict-action-effects/robot-arm",
    ]


def test_a_question_with_choices_as_a_chat(tmp_path):
    row = read(tmp_path, ROW, system="You watch.").row("train", 0)
    asked = (
        "What happens next?\n(A) It falls.\n(B) It stays.\nAnswer with the letter of the right choice.\n"
        "Answer in the following format: <think> your reasoning </think> <answer> your answer </answer>."
    )
    assert row.text == (Message(role="system", content="You watch."), Message(role="user", content=asked))
    assert row.reference == {"choice": "B", "choices": {"A": "It falls.", "B": "It stays."}}
    assert row.media == (str(tmp_path / "film.mp4"),)
    assert row.metadata == {"labels": ["physics", "physics/mechanics"], "answer_kind": "choice"}


def test_a_free_question_as_text(tmp_path):
    free = {"image": "film.mp4", "question": "Which colour?", "answer": "red"}
    row = read(tmp_path, free, chat=False, thought=False).row("train", 0)
    assert (row.text, row.reference, row.metadata["labels"]) == ("Which colour?\n", ["red"], [])


def test_rows_as_they_were_published_with_the_paper(tmp_path):
    asked = {"question": "What?", "index2ans": {"A": "x", "B": "y", "C": None}, "answer": "A"}
    row = read(tmp_path, {"video": "film.mp4", "qa_pairs": asked}).row("train", 0)
    assert row.reference == {"choice": "A", "choices": {"A": "x", "B": "y"}}


def test_a_list_of_choices_is_lettered(tmp_path):
    row = read(tmp_path, ROW | {"choices": ["x", "y"]}).row("train", 0)
    assert row.reference == {"choice": "B", "choices": {"A": "x", "B": "y"}}


def test_several_labels_and_what_is_above_them_once(tmp_path):
    row = read(tmp_path, ROW | {"labels": ["space/environment", "space/affordance"]}).row("train", 0)
    assert row.metadata["labels"] == ["space", "space/environment", "space/affordance"]


def test_a_demonstration_is_the_reasoning_and_the_right_answer(tmp_path):
    reasoned = ROW | {"reasoning": " Nothing holds it. "}
    assert (
        read(tmp_path, reasoned).row("train", 0).demonstration == "<think>Nothing holds it.</think> <answer>B</answer>"
    )
    assert read(tmp_path, reasoned, thought=False).row("train", 0).demonstration == "B"
    free = {
        "image": "film.mp4",
        "qa_pairs": {"question": "Which?", "answer": ["red", "dark red"], "reasoning": "Seen."},
    }
    assert read(tmp_path, free).row("train", 0).demonstration == "<think>Seen.</think> <answer>red</answer>"
    # Without reasoning there is nothing to imitate, unless the bare answer is what is asked for.
    assert read(tmp_path, ROW).row("train", 0).demonstration is None
    assert read(tmp_path, ROW, thought=False).row("train", 0).demonstration == "B"


def test_chats_as_they_were_published_with_the_paper(tmp_path):
    said = "<think>It slips.</think>\n<answer> It falls. </answer>"
    row = read(tmp_path, talk(SYSTEM, ASKED, said), system="You watch.").row("train", 0)
    assert row.text == (Message(role="system", content=SYSTEM), Message(role="user", content=ASKED))
    assert (row.demonstration, row.reference) == (said, ["It falls."])
    assert (row.media, row.metadata["answer_kind"]) == ((str(tmp_path / "film.mp4"),), "free")
    # A system turn of the options stands where a conversation has none; a caption is right as a whole.
    row = read(tmp_path, talk(ASKED, "A cup. "), system="You watch.").row("train", 0)
    assert row.text == (Message(role="system", content="You watch."), Message(role="user", content=ASKED))
    assert (row.demonstration, row.reference) == ("A cup. ", ["A cup."])


def test_the_rewards_take_what_is_imitated_for_right(tmp_path):
    rows = [ROW | {"reasoning": "Seen."}, talk(ASKED, "<think>Seen.</think> <answer>It falls.</answer>")]
    dataset = read(tmp_path, *rows)
    names = ("reason-accuracy", "reason-format")
    plugins = PluginSet.load(("reward", name) for name in names)
    rewards = [plugins.create("reward", name, {}, RewardContext(name=name, seed=0), "options") for name in names]
    for index in range(len(rows)):
        prompt = dataset.row("train", index)
        completion = Completion(prompt=prompt, text=prompt.demonstration)
        assert [reward.score(completion).value for reward in rewards] == [1.0, 1.0]


def test_an_instruction_of_ones_own(tmp_path):
    for own, below in [("Say A or B.", "\nSay A or B."), ("", "")]:
        (turn,) = read(tmp_path, ROW, instruction=own).row("train", 0).text
        assert turn.content == f"What happens next?\n(A) It falls.\n(B) It stays.{below}"


def test_videos_in_a_folder_of_their_own(tmp_path):
    (tmp_path / "films").mkdir()
    (tmp_path / "films" / "a.mp4").write_bytes(b"a")
    row = read(tmp_path, ROW | {"video": "a.mp4"}, media_folder="films").row("train", 0)
    assert row.media == (str(tmp_path / "films" / "a.mp4"),)
    with pytest.raises(DataError, match=r"dataset\.options\.media_folder: no folder at .*none"):
        read(tmp_path, ROW, media_folder="none")


BAD = [
    (
        {"label": "physics/mechanic"},
        "label 'physics/mechanic' is of neither ontology; did you mean 'physics/mechanics'?",
    ),
    ({"label": "zzz"}, "label 'zzz' is of neither ontology; areas are space, time, physics, embodied"),
    ({"label": 3}, "label 3 is a int, not a text"),
    ({"video": "none.mp4"}, "field 'video' names 'none.mp4', and there is no "),
    ({"video": []}, "field 'video' is empty"),
    ({"video": None}, "one of the fields video, image, media, and this one has none"),
    ({"image": "film.mp4"}, "and this one has video and image"),
    ({"answer": "C"}, "the answer is 'C', none of the choices A, B"),
    ({"answer": None}, "the answer is None, none of the choices A, B"),
    ({"answer": ["B"]}, "the answer is ['B'], none of the choices A, B"),
    ({"choices": {"A": "x"}}, "the choices are {'A': 'x'}; give two texts or more"),
    ({"choices": ["x", 3]}, "the choices are"),
    ({"choices": {"A": "x", "B": "x "}}, "two of the choices are the same"),
    ({"choices": {"(A)": "x", "B": "y"}}, "the choices have the keys ['(A)', 'B']"),
    ({"choices": None, "answer": ""}, "the answer is ''; give a text"),
    ({"question": " "}, "the question is empty"),
    ({"question": None}, "field 'question' is null, not text"),
    ({"qa_pairs": [1]}, "field 'qa_pairs' is a list, not one question"),
    ({"reasoning": ""}, "the reasoning is ''; give a text, or leave it out"),
    ({"reasoning": ["It slips."]}, "the reasoning is ['It slips.']"),
    ({"reasoning": "<think>It slips.</think>"}, "the reasoning has <think> in it"),
    (talk("What?", "This."), "the row has both 'conversations' and 'question'; give one of them"),
    (talk("What?") | {"question": None}, "field 'conversations' does not end with a turn of the assistant"),
    (talk("What?", " ") | {"question": None}, "field 'conversations' does not end with a turn of the assistant"),
    ({"conversations": "What?", "question": None}, "field 'conversations' is no list of turns"),
]


def test_a_bad_question_is_refused_with_file_and_row(tmp_path, subtests):
    for change, reason in BAD:
        with (
            subtests.test(change=change, reason=reason),
            pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{re.escape(reason)}"),
        ):
            read(tmp_path, ROW, ROW | change)


def test_a_bad_question_is_skipped_and_counted(tmp_path, subtests):
    for change, reason in BAD:
        with subtests.test(change=change, reason=reason):
            dataset = read(tmp_path, ROW, ROW | change, on_bad_row="skip")
            (omission,) = dataset.omitted("train")
            assert (dataset.size("train"), omission.num_rows) == (1, 1)
            assert reason in omission.first


def test_labels_may_be_required(tmp_path):
    unlabelled = {key: value for key, value in ROW.items() if key != "label"}
    assert read(tmp_path, unlabelled).size("train") == 1
    with pytest.raises(DataError, match="the question has no label"):
        read(tmp_path, unlabelled, labels="required")


def test_demonstrations_may_be_required_of_what_is_trained_on(tmp_path):
    good, bare = ROW | {"reasoning": "Seen."}, ROW
    (tmp_path / "benchmark.jsonl").write_text(json.dumps(bare))
    options = {"demonstrations": "required", "heldout": "benchmark.jsonl"}
    assert read(tmp_path, good, talk(ASKED, "A cup."), **options).row("heldout", 0).demonstration is None
    said = r"rows\.jsonl:2: the question has no demonstration, .* give it a field `reasoning`, or `conversations`"
    with pytest.raises(DataError, match=said):
        read(tmp_path, good, bare, **options)
    dataset = read(tmp_path, good, bare, on_bad_row="skip", **options)
    assert (dataset.size("train"), dataset.omitted("train")[0].num_rows) == (1, 1)


def test_contradictions(subtests):
    for options, message in [
        ({"heldout": "x", "heldout_rows": 2}, "at most one of"),
        ({"system": "s", "chat": False}, "needs `chat = true`"),
    ]:
        with subtests.test(options=options, message=message), pytest.raises(ValueError, match=message):
            ReasonOptions(train="x.jsonl", **options)


@pytest.mark.nightly
def test_importing_it_imports_no_torch():
    code = "import cosmos_dataset_reason.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
