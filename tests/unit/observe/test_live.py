import io

import attrs
from rich.console import Console

from cosmos_core.observe.live import LiveView, PlainView, Progress, clock, line, make_view, panel

FULL = Progress(
    phase="training",
    step=50,
    num_steps=100,
    stage="grpo",
    elapsed_s=65.0,
    reward=0.5,
    accuracy=0.75,
    evaluated_step=25,
    staleness_mean=1.25,
    policy_units_per_s=12345.0,
    rollout_units_per_s=6789.0,
    queued=3,
    in_flight=9,
    eta_s=3700.0,
)


def console(**options):
    return Console(file=io.StringIO(), width=120, **options)


def test_a_line_has_every_figure_that_is_known():
    # Clock.
    assert [clock(seconds) for seconds in (-1, 0, 59.6, 61, 3700)] == ["0:00", "0:00", "1:00", "1:01", "1:01:40"]

    # A line has every figure.
    assert line(FULL) == (
        "1:05 training | step 50/100 | stage grpo | reward 0.500 | held-out 0.750 @25 | staleness 1.25 | "
        "policy 12,345 tok/s | rollout 6,789 tok/s | queue 3 ready, 9 in flight | ETA 1:01:40"
    )

    # A held out loss is shown with its step.
    progress = Progress(
        phase="training", step=9, num_steps=12, stage="sft", elapsed_s=65.0, heldout_loss=1.23456, measured_step=8
    )
    assert line(progress) == "1:05 training | step 9/12 | stage sft | held-out loss 1.2346 @8"

    # What was evaluated and not scored was not measured.
    unscored = Progress(phase="training", step=9, num_steps=12, stage="grpo", elapsed_s=65.0, evaluated_step=5)
    assert line(unscored) == "1:05 training | step 9/12 | stage grpo | held-out not measured @5"

    # Prompts without a score are told, as an accuracy counts them as 0.
    some = attrs.evolve(unscored, accuracy=0.5, unscored="3 of 32 unscored")
    assert line(some).endswith("| held-out 0.500 @5 (3 of 32 unscored)")

    # Denoised samples have a reward and steps.
    videos = Progress(
        phase="training", step=9, num_steps=12, stage="flow-grpo", elapsed_s=65.0, heldout_reward=-0.5,
        evaluated_step=5, policy_units_per_s=40.0, unit="denoising step",
    )  # fmt: skip
    assert line(videos) == (
        "1:05 training | step 9/12 | stage flow-grpo | held-out reward -0.500 @5 | policy 40 denoising steps/s"
    )

    # What is not known is left out.
    bare = Progress(phase="starting", step=0, num_steps=100, stage="sft", elapsed_s=0.0)
    assert line(bare) == "0:00 starting | step 0/100 | stage sft"


def test_the_panel_shows_the_same_figures(monkeypatch):
    out = console()
    out.print(panel(FULL))
    shown = out.file.getvalue()
    for figure in ("step 50/100", "0.500", "0.750 @25", "12,345 tok/s", "3 ready, 9 in flight", "ETA 1:01:40"):
        assert figure in shown

    # No color is honoured.
    monkeypatch.setenv("NO_COLOR", "1")
    out = console(force_terminal=True)
    out.print(panel(FULL))
    assert "\x1b[3" not in out.file.getvalue()


def test_without_a_terminal_lines_come_now_and_then_and_with_each_evaluation():
    out = console()
    view = make_view(out)
    assert isinstance(view, PlainView)
    for _ in range(5):
        view.show(FULL)
    assert out.file.getvalue().count("\n") == 1
    view.show(
        Progress(phase="training", step=51, num_steps=100, stage="grpo", elapsed_s=66, accuracy=1.0, evaluated_step=50)
    )
    assert out.file.getvalue().count("\n") == 2
    view.close()


def test_a_terminal_gets_a_live_panel_that_goes_away():
    out = console(force_terminal=True)
    view = make_view(out)
    assert isinstance(view, LiveView)
    view.show(FULL)
    view.say("something happened")
    view.close()
    assert "something happened" in out.file.getvalue()
