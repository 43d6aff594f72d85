"""The live page in a real headless Chromium, served by a real controller, and what it refuses."""

from __future__ import annotations

import base64
import http.server
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import attrs
import pytest
from PIL import Image

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job, recipe_from, save_job
from cosmos_core.control.journal import entries
from cosmos_core.control.live.event_feed import Curve, News, SampleView
from cosmos_core.control.live.snapshot import ReplicaView, Snapshot
from cosmos_core.control.machine.events import Commanded
from cosmos_core.control.machine.records import EvaluationRecord, HeldOutCompletion
from cosmos_core.control.page.service import Page
from cosmos_core.run.follower import Follower
from cosmos_core.run.report.page import write_report
from cosmos_core.run.report.summary import summarise
from cosmos_core.run.status import look
from cosmos_core.run.supervisor import Ending
from cosmos_core.transport.messages import REQUEST, Drain
from tests import snapshots
from tests.kept_samples import RECIPE, group, keep, payload, trained

from .browser import Browser, find

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(find() is None, reason="no Chromium on this machine (make browser installs one on Debian)"),
]

EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def browser(tab) -> Browser:
    tab.go("about:blank")
    tab.look(width=1280, height=900)
    tab.complaints.clear()
    return tab


def snapshot(**changes) -> Snapshot:
    text = f"{EVIL}\n</pre>"
    sample = SampleView(time=1.0, lease=1, replica="rollout-0", version=2, status="ok", reward=1.0, units=9, text=text)
    completion = HeldOutCompletion(row=3, text=EVIL, reward=-1.25, detail=EVIL, media="media/step-2/row-3.mp4")
    default = {
        "heldout": EvaluationRecord(
            version=2,
            accuracy=None,
            reward=-1.25,
            num_prompts=1,
            num_unscored=0,
            num_truncated=0,
            completions=(completion, attrs.evolve(completion, row=22, media="")),
        ),
        "time": time.time(),
        "step": 2,
        "version": 2,
        "statuses": {"policy": {"training": 1}, "rollout": {"generating": 1}},
        "replicas": (
            ReplicaView(name="policy-0", role="policy", status="training", step=2, place="pid 1 on host"),
            ReplicaView(name="rollout-0", role="rollout", status="generating", step=2, in_flight=4),
        ),
        "news": (News(time=time.time(), kind="problem", text=EVIL),),
        "samples": (sample,),
        "curves": (Curve(name="reward", points=((1.0, 0.2), (2.0, 0.4))),),
    }
    return snapshots.snapshot(**default | changes)


def keep_samples(folder: Path, *, words: str) -> None:
    """Samples of a run: a prompt with a picture, one whose video is kept, and a dialogue of three tokens."""
    save_job(Job(run_id="demo-1", directory=folder, recipe_directory=folder, recipe=recipe_from(RECIPE)))
    picture = io.BytesIO()
    Image.new("RGB", (24, 24), (51, 51, 230)).save(picture, format="png")
    given = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    held = payload([True, False, True], units=(7, 8, 9))
    rows = [
        *group(1, 1.0, 0.0, text=words, media=(given,)),
        *group(2, -0.25, purpose="evaluation", version=2, kept="media/step-2/row-3.webp", text=""),
        *group(3, 0.5, None, text="a dialogue", held=held),
    ]
    keep(folder, "samples", "rollout-0", rows)
    keep(
        folder,
        "steps",
        "policy-0",
        [trained(1, 1, 1, 0.5, -0.5), trained(1, 1, 3, 0.1, 0.0, ratios=[[1.0, 0.5], None])],
    )


@pytest.fixture
def page(tmp_path) -> Iterator[Page]:
    """A page of a run that a thread of this process plays: it takes any request."""
    (tmp_path / "media" / "step-2").mkdir(parents=True)
    Image.new("RGB", (160, 40), (51, 230, 51)).save(tmp_path / "media" / "step-2" / "row-3.webp")
    Image.new("RGB", (160, 20), (230, 51, 51)).save(tmp_path / "media" / "step-2" / "row-3.strip.webp", lossless=True)
    found, over = Page(tmp_path, "127.0.0.1", 0), threading.Event()
    found.asked = []

    def play() -> None:
        while not over.wait(0.02):
            for asked in found.board.take_asked():
                found.asked.append(REQUEST.decode(asked.request))
                found.board.answer(asked.ident, "")

    player = threading.Thread(target=play)
    player.start()
    found.start()
    found.board.offer(snapshot())
    yield found
    over.set()
    player.join()
    found.close()


def test_what_a_model_writes_is_shown_as_text_and_does_not_run(page, browser):
    browser.go(page.address)
    browser.until("document.querySelector('#samples pre')")
    assert browser.text("#samples pre") == f"{EVIL}\n</pre>"
    assert EVIL in browser.text("#news")
    assert [EVIL in browser.text(f"#heldout article:first-child {part}") for part in ("div", "pre")] == [True, True]
    markup = "pre *, #heldout div :not(button), #news img, body script"
    assert browser.evaluate(f"document.querySelectorAll('{markup}').length") == 0
    assert browser.evaluate("document.title") == "arithmetic: training"

    # Frames are shown where there are any.
    frames = "document.querySelector('#heldout article:first-child > img')"
    assert browser.until(f"{frames}?.naturalWidth") == 160
    assert browser.evaluate(f"{frames}.src.startsWith('blob:')")
    assert browser.evaluate("document.querySelectorAll('#heldout article').length") == 2
    assert browser.evaluate("document.querySelectorAll('img').length") == 1
    assert browser.complaints == []


LIST = "document.querySelectorAll('.samples .list > button')"


def look_at_samples(browser: Browser) -> None:
    """Go through a browser of samples, which is shown, click by click."""
    browser.until(f"{LIST}.length === 3")
    assert browser.text(".samples .note") == "3 of 3 prompts"
    browser.evaluate("document.querySelector('.samples [name=order]').value = 'best'")
    browser.evaluate("document.querySelector('.samples [name=purpose]').value = 'train'")
    browser.evaluate("document.querySelector('.samples form button').click()")
    browser.until(f"{LIST}.length === 2 && {LIST}[1].innerText.startsWith('step 1 · reward 0.5')")
    browser.evaluate(f"{LIST}[1].click()")
    browser.until("document.querySelector('.samples .prompt')?.innerText === 'prompt of 1?'")
    shown = browser.text(".samples .detail")
    for words in ("#0 reward 1 (math 1) · advantage 0.5 · ok · trained", "advantage -0.5", "reference: ", EVIL):
        assert words in shown
    assert browser.evaluate("document.querySelectorAll('.samples pre *, .samples article img').length") == 0
    assert browser.until("document.querySelector('.samples .given img')?.naturalWidth") == 24

    # Tokens are shown on one click, those of the environment apart, and the values of each.
    browser.evaluate(f"{LIST}[0].click()")
    browser.until("document.querySelector('.samples .prompt').innerText === 'prompt of 3?'")
    browser.evaluate("document.querySelector('.samples article > button').click()")
    browser.until("document.querySelectorAll('.samples [data-at]').length === 3")
    classes = browser.evaluate("[...document.querySelectorAll('.samples [data-at]')].map((each) => each.className)")
    assert classes == ["t h1", "t other", "t h1"]
    browser.evaluate("document.querySelectorAll('.samples [data-at]')[2].click()")
    assert browser.text(".samples output") == "token 2 · id 9 · log-prob -0.5000 (probability 0.607) · ratio 0.5"
    browser.evaluate("document.querySelectorAll('.samples .legend button')[1].click()")
    classes = browser.evaluate("[...document.querySelectorAll('.samples [data-at]')].map((each) => each.className)")
    assert classes == ["t h0", "t other", "t h4 low"]
    browser.evaluate("document.querySelectorAll('.samples [data-at]')[1].click()")
    assert "not the model's" in browser.text(".samples output")

    # What is searched for is found, or not; a file of the run is shown.
    for words, found in (("of 2?", 1), ("nowhere", 0)):
        browser.evaluate("document.querySelector('.samples [name=purpose]').value = ''")
        browser.evaluate(f"document.querySelector('.samples [name=text]').value = {json.dumps(words)}")
        browser.evaluate("document.querySelector('.samples form button').click()")
        browser.until(f"{LIST}.length === {found}")
        if found:
            assert browser.until("document.querySelector('.samples article img')?.naturalWidth") == 160
    for width in (1280, 390):
        browser.look(width=width, height=900)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.title.includes('owned')") is False
    assert browser.complaints == []


def test_samples_are_looked_at_on_the_page(page, browser, tmp_path):
    keep_samples(tmp_path, words=EVIL)
    browser.go(page.address)
    browser.until("document.querySelector('#samples pre')")
    assert browser.evaluate("document.querySelector('#browsed').childElementCount") == 0
    browser.evaluate("document.querySelector('#browser > summary').click()")
    look_at_samples(browser)

    # A prompt is shown where it is asked for; what waits may be trained on yet.
    for place, lease in (("#samples", 1), ("#heldout article + article", 2)):
        browser.evaluate(f"document.querySelector('{place} .hint > button').click()")
        shown = browser.until(f"document.querySelector('{place} .prompt')?.innerText")
        assert shown == f'prompt of {lease}?\nreference: {{"answer":{lease}}}'
    keep(tmp_path, "samples", "rollout-1", group(9, 0.5))
    browser.evaluate("document.querySelector('.samples [name=text]').value = 'of 9?'")
    browser.evaluate("document.querySelector('.samples form button').click()")
    browser.until(f"{LIST}.length === 1 && {LIST}[0].innerText.includes('1 not trained so far')")


def test_samples_are_looked_at_in_a_report(browser, tmp_path):
    (tmp_path / "media" / "step-2").mkdir(parents=True)
    Image.new("RGB", (160, 40), (51, 230, 51)).save(tmp_path / "media" / "step-2" / "row-3.webp")
    keep_samples(tmp_path, words=EVIL)
    job, follower = load_job(tmp_path), Follower()
    report = write_report(job, follower, summarise(job, follower, Ending(outcome="stopped"), wall_s=1.0), None)
    browser.go(report.as_uri())
    look_at_samples(browser)


def test_groups_are_listed_once_and_a_late_error_is_not_shown_for_another(page, browser):
    browser.go(page.address)
    browser.until("document.querySelector('#samples pre')")
    browser.evaluate("""(() => {
      const facts = { purpose: "train", step: 1, reward: 1, statuses: {}, fates: {} };
      const group = (lease) => ({ ...facts, lease, prompt: `prompt ${lease}` });
      // While the first page was looked at, another group was finished.
      const pages = { 0: [4, 3], 2: [3, 2], 4: [1] };
      const shown = { attempt: 1, position: 0, row: 0, prompt_media: [], reference: null, metadata: {}, total: 300 };
      const tokens = { ids: [1, 2], pieces: null, logprobs: [-0.1, -0.1], ratios: ["inf", 1], total: 2 };
      const sample = { index: 0, reward: 1, rewards: {}, advantage: 0, completion: "", num_units: 0 };
      globalThis.failures = [];
      const source = {
        groups: async ({ first }) => ({ groups: pages[first].map(group), total: 5, note: "" }),
        group: (lease) => lease === 3
          ? new Promise((_, reject) => failures.push(() => reject(new Error("too late"))))
          : Promise.resolve({ ...shown, ...group(lease), samples: [sample] }),
        tokens: async () => tokens,
        media: async () => null,
      };
      browseSamples(document.getElementById("browsed"), source);
    })()""")
    browser.evaluate("document.querySelector('#browser').open = true")
    for number in (2, 3, 4):
        browser.until(f"document.querySelectorAll('.samples .list div').length === {number}")
        browser.evaluate("document.querySelector('.samples .more')?.click()")
    prompts = "[...document.querySelectorAll('.samples .list div')].map((each) => each.innerText)"
    assert browser.evaluate(prompts) == ["prompt 4", "prompt 3", "prompt 2", "prompt 1"]
    assert browser.text(".samples .note") == "4 of 5 prompts"
    for number in (1, 2):
        browser.evaluate(f"{LIST}[{number}].click()")
    browser.until("document.querySelector('.samples .prompt')?.innerText === 'prompt 2'")
    browser.evaluate("failures[0]()")
    assert browser.evaluate("new Promise((done) => setTimeout(done, 50)).then(() => 1)") == 1
    assert "too late" not in browser.text(".samples .detail")
    assert "The first 1 of 300 samples." in browser.text(".samples .detail")
    # A ratio that is no number has the strongest colour.
    browser.evaluate("document.querySelector('.samples article > button').click()")
    browser.until("document.querySelectorAll('.samples [data-at]').length === 2")
    browser.evaluate("document.querySelectorAll('.samples .legend button')[1].click()")
    classes = browser.evaluate("[...document.querySelectorAll('.samples [data-at]')].map((each) => each.className)")
    assert classes == ["t h5", "t h0"]
    assert browser.complaints == []


def test_scripts_that_got_into_the_page_would_not_run(page, browser):
    browser.go(page.address)
    browser.until("document.querySelector('#samples pre')")
    for attempt in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.createElement('img').setAttribute('onerror', 'document.title = 1')",
        "document.createElement('script').textContent = 'document.title = 1'",
    ):
        refused = browser.evaluate(f"(() => {{ try {{ {attempt}; return ''; }} catch (e) {{ return e.name; }} }})()")
        assert refused == "TypeError", attempt
    assert browser.evaluate("document.title") == "arithmetic: training"


def test_curves_grow_and_the_end_is_shown(page, browser):
    browser.go(page.address)
    points = "Number(document.querySelector('[data-curve=reward]')?.dataset.points)"
    browser.until(f"{points} === 2")
    for step in range(3, 9):
        curve = Curve(name="reward", points=tuple((float(x), x / 10) for x in range(1, step + 1)))
        page.board.offer(snapshot(step=step, curves=(curve, attrs.evolve(curve, name="warm-up loss"))))
        browser.until(f"{points} === {step}")
        assert browser.text("#steps").startswith(f"step {step} of 9, ")
    assert browser.text("[data-curve='warm-up loss'] figcaption").startswith("Loss of the warm-up")
    page.board.offer(snapshot(step=9, outcome="finished", phase="finished"))
    page.board.end()
    browser.until("document.querySelector('#connection').innerText === 'the run has ended'")
    assert browser.text("#phase") == "finished"
    assert browser.complaints == []


def test_a_page_whose_controller_is_gone_says_so_and_comes_back(page, browser, tmp_path):
    browser.go(page.address)
    browser.until("document.querySelector('#connection').innerText === 'live'")
    browser.until("document.querySelector('#heldout img')?.naturalWidth")  # no connection is being made any more
    port = page._socket.getsockname()[1]
    page.board.has_ended = True  # as if it was killed: without a word
    page.board._loop.call_soon_threadsafe(page.board._loop.stop)
    page.close()
    browser.until("document.querySelector('#connection').innerText.includes('trying again')")
    again = Page(tmp_path, "127.0.0.1", port)
    again.board.offer(snapshot(term=2, step=7))
    again.start()
    try:
        browser.until("document.querySelector('#steps').innerText.startsWith('step 7 of 9, ')")
        assert browser.text("#connection") == "live"
    finally:
        again.close()


def test_a_drain_needs_the_token(page, browser):
    browser.go(page.address)
    browser.until("document.querySelector('#drain').options.length === 2")
    browser.submit("#drain-form", drain="rollout-0")
    browser.until("document.querySelector('#answer').innerText.includes('refused')")
    assert "token" in browser.text("#answer")
    assert page.asked == []
    browser.submit("#token-form", token=page.token_file.read_text().strip())
    browser.submit("#drain-form", drain="rollout-0")
    browser.until("document.querySelector('#answer').innerText === 'drain: taken in'")
    assert page.asked == [Drain(name="rollout-0")]
    assert browser.evaluate("document.cookie") == ""
    assert browser.evaluate("document.documentElement.outerHTML").find(page.token_file.read_text().strip()) == -1


def test_another_origin_is_refused(page, browser):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>other</title>")

        def log_message(self, *_):
            pass

    token = page.token_file.read_text().strip()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        browser.go(f"http://127.0.0.1:{server.server_port}/")
        for mode in ("cors", "no-cors"):
            fetched = f"fetch('{page.address}api/snapshot', {{mode: '{mode}'}})"
            assert browser.evaluate(f"{fetched}.then((a) => a.type + a.status, () => 'refused')") in (
                "refused",
                "opaque0",
            )
        body = json.dumps({"do": "drain", "name": "rollout-0"})
        for headers in ({}, {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}):
            asked = f"fetch('{page.address}api/requests', {{method: 'POST', body: {body!r}, headers: {headers!r}}})"
            assert browser.evaluate(f"{asked}.then((a) => a.type, () => 'refused')") == "refused"
        frame = f"document.body.append(Object.assign(document.createElement('iframe'), {{src: '{page.address}'}}))"
        browser.evaluate(frame)
        browser.until("document.querySelector('iframe').contentDocument === null")
        assert browser.evaluate(f"import('{page.address}page.js').then(() => 'loaded', () => 'refused')") == "refused"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert page.asked == []


def test_every_control_has_a_name_and_the_page_fits_a_phone_in_the_dark(page, browser):
    browser.go(page.address)
    browser.until("document.querySelector('#samples pre')")
    browser.call("Accessibility.enable")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    controls = [
        node for node in nodes if node["role"]["value"] in ("button", "textbox", "combobox", "progressbar", "image")
    ]
    assert len(controls) >= 9
    assert all(node["name"]["value"] for node in controls)
    light = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.look(width=360, height=800, dark=True)
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360


def test_a_real_run_is_seen_steered_and_stopped(imitation, processes, browser, tmp_path):
    job = imitation(tmp_path / "run", "run.steps=1000000", "policy.checkpoint.interval=0")
    controller = processes.controller(job)
    found = json.loads((job.directory / "controller.json").read_text())
    processes.policy(job, 0)
    command = [sys.executable, "-m", "cosmos_core.cli", "status", str(job.directory), "--watch"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    processes.started.append(watcher)
    browser.go(found["page"])
    browser.until("document.querySelector('#name').innerText === 'imitation'")
    points = "Number(document.querySelector('[data-curve=loss]')?.dataset.points)"
    first = browser.until(f"{points} > 1 && {points}", timeout_s=90)
    assert browser.until(f"{points} > {first} && {points}") > first
    assert "training" in browser.until("document.querySelector('#replicas').innerText")
    assert any("live page" in words for words in look(job.directory))
    with urlopen(f"{found['page']}metrics") as answer:
        assert b"\ncosmos_step " in answer.read()

    browser.submit("#token-form", token=Path(found["page_token"]).read_text().strip())
    browser.submit("#drain-form", drain="policy-0")
    browser.until("document.querySelector('#answer').innerText.startsWith('drain: refused')")  # it is the last one
    browser.submit("#set-form", overrides="policy.optimizer.lr=1e-4")
    browser.until("document.querySelector('#answer').innerText === 'set: taken in'")
    browser.until("document.querySelector('#figures').innerText.includes('policy.optimizer.lr')")
    browser.evaluate("window.confirm = () => true")
    browser.submit("#stop-form")
    browser.until("document.querySelector('#connection').innerText === 'the run has ended'", timeout_s=60)
    assert browser.text("#phase") == "stopped"
    assert controller.wait(20) == 0
    told, _ = watcher.communicate(timeout=40)
    assert watcher.returncode == 0
    for words in (
        "  joined: policy-0 ",
        "  asked: set policy.optimizer.lr=1e-4",
        "  asked: stop",
    ):
        assert words in told
    assert re.search(r"imitation: \d+:\d\d stopped \| ", told)
    asked = [REQUEST.decode(event.request) for _, _, event in entries(job.journal) if isinstance(event, Commanded)]
    assert [type(request).__name__ for request in asked] == ["Set", "Stop"]
    assert [complaint for complaint in browser.complaints if "409" not in complaint] == []
