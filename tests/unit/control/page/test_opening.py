"""A run's page, or none: what the controller announces of it."""

import json
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest

from cosmos_core.config.job import Job, StageFacts
from cosmos_core.config.loading import recipe_from
from cosmos_core.control.page.window import opened


@pytest.fixture
def make_job(tmp_path):
    def make(**control):
        recipe = {
            "run": {"name": "demo", "steps": 6},
            "model": {"plugin": "hf", "config": {"model_type": "qwen3"}},
            "algorithm": {"plugin": "sft"},
            "policy": {"optimizer": {"lr": 1e-6}},
            "dataset": {"plugin": "numbers"},
            "control": control,
        }
        return Job(
            run_id="demo-1",
            directory=tmp_path,
            recipe_directory=tmp_path,
            recipe=recipe_from(recipe),
            num_train_rows=20,
            num_heldout_rows=0,
            num_evaluation_prompts=0,
            uses_rollouts=False,
            stages=(StageFacts(source="demonstrations"),),
        )

    return make


def test_where_the_page_and_its_token_are_is_announced_if_there_is_one(make_job, tmp_path):
    with opened(make_job(page_port=-1)) as page:
        assert (page.window, page.announcement) == (None, {})
    assert not (tmp_path / "page.token").exists()

    with opened(make_job()) as page:
        assert page.window is not None
        assert Path(page.announcement["page_token"]) == tmp_path / "page.token"
        with urlopen(page.announcement["page"], timeout=5) as answer:
            assert b"<title>cosmos</title>" in answer.read()


def test_a_run_goes_on_without_a_page_that_cannot_be_opened(make_job, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken, opened(make_job(page_port=taken.getsockname()[1])) as page:
        assert page.window is None
        assert "control.page_port" in page.announcement["page_problem"]
    assert "the run goes on without its page" in caplog.text


def test_a_controller_that_comes_back_has_its_page_where_it_was_if_that_can_be(make_job, tmp_path, subtests):
    with opened(make_job()) as page:
        before = page.announcement
    (tmp_path / "controller.json").write_text(json.dumps({"address": "tcp://x", **before}))
    with opened(make_job()) as page:
        assert page.announcement == before

    for announced in ["", "[]", "{}", '{"page": 1}', '{"page": "http://x:99999999/"}']:
        with subtests.test(announced=announced):
            (tmp_path / "controller.json").write_text(announced)
            with opened(make_job()) as page:
                assert page.window is not None
