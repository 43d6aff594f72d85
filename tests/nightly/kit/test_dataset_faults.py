"""Wrong datasets, each of which the kit must name."""

import pytest

from cosmos_core.protocols import DatasetContext
from cosmos_core.testing.conformance import dataset as process
from tests.nightly.kit.outcomes import unnamed, wrong

DATASET = """
import itertools, random
from cosmos_core.protocols import DatasetCapabilities, Provider, hookimpl
from cosmos_core.protocols.dataset import Omission, Window
from cosmos_core.types import Message, Prompt

COUNTER = itertools.count()
SHARED = {{"source": "squares"}}
LATEST = {{}}
SIZES = {{"train": 20, "heldout": 4}}


class Dataset:
    def __init__(self, options, context):
        self.seed = LATEST["seed"] = context.seed
        self.reads = 0
        self.numbers = itertools.count()
        self.metadata = {{}}

    def size(self, split):
        {size}

    def row(self, split, index):
        {check}
        self.reads += 1
        number = index if split == "train" else 100 + index
        fields = {{"text": str(number), "reference": str(number**2)}}
        {row}

{more}

@hookimpl
def cosmos_dataset():
    return Provider(create=Dataset, capabilities=DatasetCapabilities({capabilities}))
"""
CHECK = "if not 0 <= index < SIZES[split]: raise IndexError(index)"


OMITTED = "    def omitted(self, split):\n        "
WINDOWS = "    def windows(self, num_prompts):\n        "


def dataset(row="return Prompt(**fields)", *, size="return SIZES[split]", check=CHECK, capabilities="", more=""):
    return DATASET.format(row=row, size=size, check=check, capabilities=capabilities, more=more)


MANY = {
    "size": "return {'train': 1000, 'heldout': 50}[split]",
    "check": "if not 0 <= index < self.size(split): raise IndexError(index)",
}
GOOD = {
    "squares": dataset(),
    "seeded": dataset("return Prompt(**fields | {'text': str(random.Random(f'{self.seed}:{number}').random())})"),
    "large": dataset(size="return 10**12", check="if not 0 <= index < 10**12: raise IndexError(index)"),
    "chats": dataset("return Prompt(**fields | {'text': (Message(role='user', content=str(number)),)})"),
    "videos": dataset("return Prompt(text='', media=(f's3://films/{number}.mp4',))", capabilities="references=False"),
    "pictures": dataset("return Prompt(**fields, media=('data:image/png;base64,aGk=', __file__))"),
    "taught": dataset("return Prompt(**fields, demonstration=str(number))", capabilities="demonstrations=True"),
    "preferring": dataset(
        "return Prompt(**fields, demonstration='a', rejected='b')",
        capabilities="demonstrations=True, preferences=True",
    ),
    "omitting": dataset(more=OMITTED + "return (Omission(reason='torn', num_rows=2, first='rows:1'),)"),
    "paced": dataset(more=WINDOWS + "return (Window(num_prompts=max(1, num_prompts // 2), num_rows=5),)"),
    "train-only": dataset(
        size="return 20 if split == 'train' else 0",
        check="if not 0 <= index < self.size(split): raise IndexError(index)",
    ),
}
MEANT = {
    "few-prompts": (dataset("return Prompt(text=str(index % 3), reference=split)"), "repeats_rows = True"),
    "by-heart": (dataset("return Prompt(text=str(index), reference='?')"), "holds_out_train_rows = True"),
}
PLANTED = {
    "relative-location": (
        dataset("return Prompt(**fields, media=('first.png',))"),
        "test_rows_are_prompts_that_can_be_sent",
        "media has 'first.png', which is another file in another folder; give Path(…).absolute()",
    ),
    "lost-location": (
        dataset("return Prompt(**fields, media=(f'/nowhere/{number}.mp4',))"),
        "test_rows_are_prompts_that_can_be_sent",
        "media has '/nowhere/0.mp4', and there is no such file",
    ),
    "bare-data": (
        dataset("return Prompt(**fields, media=('data:image/png,%89PNG',))"),
        "test_rows_are_prompts_that_can_be_sent",
        "media 'data:image/png,%89PNG': a data URL is in base64, data:TYPE;base64,DATA",
    ),
    "broken-data": (
        dataset("return Prompt(**fields, media=('data:image/png;base64,a',))"),
        "test_rows_are_prompts_that_can_be_sent",
        "media 'data:image/png;base64,a': no base64",
    ),
    "iterator": (
        dataset("return Prompt(**fields | {'text': str(next(self.numbers))})"),
        "test_a_row_is_the_same_whenever_it_is_read",
        "row 0 of train is another one at a second call: its text is '0', then '24'",
    ),
    "global-iterator": (
        dataset("return Prompt(**fields | {'text': str(next(COUNTER))})"),
        "test_a_row_is_the_same_whenever_it_is_read",
        "row 0 of train is another one at a second call",
    ),
    "in-order-only": (
        dataset("return Prompt(**fields | {'text': str(self.reads - 1)})"),
        "test_a_row_is_the_same_whenever_it_is_read",
        "row 3 of heldout is another one if the rows are read backwards: its text is '23', then '0'",
    ),
    "ignores-the-index": (
        dataset("return Prompt(text='?', reference='4')"),
        "test_each_row_comes_once",
        "all 20 rows of train that were read are the same; does row() use its index?",
    ),
    "ignores-the-split": (
        dataset("return Prompt(text=str(index), reference=str(index**2))"),
        "test_each_row_comes_once",
        "4 of the 4 held-out rows that were read are train rows too, row 0 for example; does row() use its split?",
    ),
    "ignores-the-split-of-many": (
        dataset("return Prompt(text=str(index), reference=str(index**2))", **MANY),
        "test_each_row_comes_once",
        "48 of the 48 held-out rows that were read are train rows too",
    ),
    "last-train-rows-held-out": (
        dataset("return Prompt(text=str(index + (950 if split == 'heldout' else 0)), reference='?')", **MANY),
        "test_each_row_comes_once",
        "48 of the 48 held-out rows that were read are train rows too",
    ),
    "ten-rows-repeated": (
        dataset("return Prompt(text=str(index % 10), reference=str(split))", **MANY),
        "test_each_row_comes_once",
        "38 of the 48 train rows that were read repeat an earlier one, and size('train') is 1000",
    ),
    "hash": (
        dataset("return Prompt(**fields | {'text': str(hash(str(number)))})"),
        "test_a_row_is_the_same_wherever_it_is_read",
        "row 0 of train is another one in another process",
    ),
    "negative-index": (
        dataset(check="if index >= SIZES[split]: raise IndexError(index)"),
        "test_an_index_out_of_range_is_refused",
        "row('train', -1) of 20 rows is Prompt(text='-1'",
    ),
    "key-error": (
        dataset(check="if not 0 <= index < SIZES[split]: raise KeyError(index)"),
        "test_an_index_out_of_range_is_refused",
        "row('train', -1) of 20 rows raised KeyError: -1; raise IndexError",
    ),
    "too-few-rows": (
        dataset(check="if not 0 <= index < SIZES[split] - 1: raise IndexError(index)"),
        "test_rows_are_prompts_that_can_be_sent",
        "row('train', 19) raised IndexError: 19; its size says there are 20 rows",
    ),
    "undeclared-demonstrations": (
        dataset("return Prompt(**fields, demonstration='4')"),
        "test_rows_are_prompts_that_can_be_sent",
        "row 0 of train has a demonstration, but they are not declared: DatasetCapabilities(demonstrations=True)",
    ),
    "missing-demonstrations": (
        dataset(capabilities="demonstrations=True"),
        "test_rows_are_prompts_that_can_be_sent",
        "it declares demonstrations, but none of the train rows that were read has one",
    ),
    "missing-references": (
        dataset("return Prompt(text=fields['text'])"),
        "test_rows_are_prompts_that_can_be_sent",
        "or declare DatasetCapabilities(references=False)",
    ),
    "growing": (
        dataset(size="return SIZES[split] + self.reads"),
        "test_what_planning_asks_is_settled",
        "size('train') is 20 at first and 40 after rows were read; settle it when the dataset is made",
    ),
    "no-size": (
        dataset(size="return None"),
        "test_what_planning_asks_is_settled",
        "size('train') is None, a NoneType; return an int",
    ),
    "one-split": (
        dataset(size="return {'train': 20}[split]"),
        "test_what_planning_asks_is_settled",
        "size('heldout') raised KeyError: 'heldout'; return an int, 0 where the split does not exist",
    ),
    "empty": (
        dataset(size="return 0"),
        "test_what_planning_asks_is_settled",
        "size('train') is 0",
    ),
    "shared-metadata": (
        dataset("return Prompt(**fields, metadata=SHARED)"),
        "test_reading_a_row_changes_nothing_else",
        "row('train', 0) and row('train', 1) hold the same dict in their metadata; make a new one for each row",
    ),
    "metadata-of-eight-rows": (
        dataset("return Prompt(**fields, metadata=SHARED.setdefault(number // 8, {}))", **MANY),
        "test_reading_a_row_changes_nothing_else",
        "hold the same dict in their metadata; make a new one for each row",
    ),
    "changing-metadata": (
        dataset("self.metadata['number'] = number; return Prompt(**fields, metadata=self.metadata)"),
        "test_reading_a_row_changes_nothing_else",
        "row 0 of train changed when others were read",
    ),
    "tuple-reference": (
        dataset("return Prompt(**fields | {'reference': (number, number**2)})"),
        "test_rows_are_prompts_that_can_be_sent",
        "row 0 of train: reference is (0, 0), and as JSON [0, 0]; give text, numbers, lists and dicts",
    ),
    "unsendable": (
        dataset("return Prompt(**fields, metadata={'power': 2**70})"),
        "test_rows_are_prompts_that_can_be_sent",
        "row 0 of train: metadata['power'] is 1180591620717411303424, more than 64 bits; write it as text",
    ),
    "media-objects": (
        dataset("return Prompt(**fields, media=(b'png',))"),
        "test_rows_are_prompts_that_can_be_sent",
        "Expected `str`, got `bytes` - at `$.completion.prompt.media[0]`; give what cosmos_core.types.Prompt says",
    ),
    "list-of-turns": (
        dataset("return Prompt(**fields | {'text': [{'role': 'user', 'content': 'hi'}]})"),
        "test_rows_are_prompts_that_can_be_sent",
        "but a reward gets (Message(role='user', content='hi'),); give what cosmos_core.types.Prompt says",
    ),
    "dicts": (
        dataset("return fields"),
        "test_rows_are_prompts_that_can_be_sent",
        "row('train', 0) is a dict: {'text': '0', 'reference': '0'}; return a cosmos_core.types.Prompt",
    ),
    "global-generator": (
        dataset("random.seed(number); return Prompt(**fields | {'text': str(random.random())})"),
        "test_reading_a_row_changes_nothing_else",
        "reading rows draws from or seeds the global generator of random",
    ),
    "global-generator-of-torch": (
        "import torch\n" + dataset("torch.manual_seed(number); return Prompt(**fields)"),
        "test_reading_a_row_changes_nothing_else",
        "reading rows draws from or seeds the global generator of torch",
    ),
    "undeclared-preferences": (
        dataset("return Prompt(**fields, demonstration='a', rejected='b')", capabilities="demonstrations=True"),
        "test_rows_are_prompts_that_can_be_sent",
        "row 0 of train has a rejected completion, but they are not declared: DatasetCapabilities(preferences=True)",
    ),
    "rejected-alone": (
        dataset("return Prompt(**fields, rejected='b')", capabilities="preferences=True"),
        "test_rows_are_prompts_that_can_be_sent",
        "row 0 of train: it has the rejected completion 'b' and the demonstration None; give both, and two that differ",
    ),
    "rejected-list": (
        dataset("return Prompt(**fields, rejected=['b'])", capabilities="preferences=True"),
        "test_rows_are_prompts_that_can_be_sent",
        "row 0 of train: it cannot be sent to a reward: malformed message of",
    ),
    "omitting-numbers": (
        dataset(more=OMITTED + "return 3"),
        "test_what_planning_asks_is_settled",
        "omitted('train') is 3; return a tuple of cosmos_core.protocols.dataset.Omission",
    ),
    "omitting-none": (
        dataset(more=OMITTED + "return (Omission(reason='torn', num_rows=0, first=''),)"),
        "test_what_planning_asks_is_settled",
        "each with a reason of its own, and how many rows there are of it: 1 or more",
    ),
    "omitting-more-and-more": (
        dataset(more=OMITTED + "return (Omission(reason='torn', num_rows=1 + self.reads, first=''),)"),
        "test_what_planning_asks_is_settled",
        "settle it when the dataset is made",
    ),
    "window-too-wide": (
        dataset(more=WINDOWS + "return (Window(num_prompts=4, num_rows=21),)"),
        "test_what_planning_asks_is_settled",
        "a window has 1 prompt or more, and 1 to 20 rows, as many as there are",
    ),
    "empty-window": (
        dataset(more=WINDOWS + "return (Window(num_prompts=num_prompts // 10, num_rows=5),)"),
        "test_what_planning_asks_is_settled",
        "windows(1): Window(num_prompts=0, num_rows=5); a window has 1 prompt or more",
    ),
    "changing-windows": (
        dataset(more=WINDOWS + "return (Window(num_prompts=4, num_rows=1 + self.reads % 7),)"),
        "test_what_planning_asks_is_settled",
        "after rows were read; settle it when the dataset is made",
    ),
    "last-seed-wins": (
        dataset("return Prompt(**fields | {'text': str((LATEST['seed'], number))})"),
        "test_a_row_is_the_same_wherever_it_is_read",
        "row 0 of train is another one once a dataset of another seed is read too: its text is '(0, 0)', then '(1, 0)'",
    ),
}


@pytest.fixture(scope="module")
def outcomes(run_kit):
    sources = {name: source for name, (source, *_) in (MEANT | PLANTED).items()}
    return run_kit("dataset", GOOD | sources, bodies={name: body for name, (_, body) in MEANT.items()})


def test_good_datasets_pass(outcomes):
    assert wrong(outcomes, GOOD | MEANT) == {}
    for name in GOOD | MEANT:
        assert sum(each.result == "skipped" for each in outcomes[name]) <= 1, name


def test_each_fault_is_named(outcomes):
    assert unnamed(outcomes, PLANTED) == {}


def test_a_process_that_does_not_answer_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(process, "_TIMEOUT_S", 0.01)
    context = DatasetContext(seed=0, directory=tmp_path)
    with pytest.raises(pytest.fail.Exception, match=r"another process did not read 1 rows in 0\.01 s"):
        process.read_elsewhere("arithmetic", {}, context, [("train", 0)])
