from cosmos_core.config.stages import stages
from cosmos_core.run.follow import Follower
from cosmos_core.run.view import progress_of, starting


def progress(job, history, *, later_s=0.0):
    follower = Follower()
    follower.fold(history.entries)
    now = 1000.0 + len(history.entries) + later_s
    return follower, progress_of(follower, stages(job.recipe), now=now, elapsed_s=1.0)


def test_before_its_first_news_a_resumed_session_shows_where_it_starts_and_nothing_else(job):
    shown = starting(stages(job.recipe), 4, elapsed_s=1.0)
    assert (shown.phase, shown.step, shown.num_steps, shown.stage) == ("starting", 4, 9, "grpo")
    assert shown.eta_s is shown.policy_units_per_s is shown.reward is shown.heldout_loss is None
    assert starting(stages(job.recipe), 0, elapsed_s=1.0).stage == "sft"
    assert starting(stages(job.recipe), 9, elapsed_s=1.0).stage == "grpo"


def test_after_a_resume_there_is_no_rate_until_two_steps_of_the_session_are_done(job, history):
    history.join()
    history.work(until=6)
    history.resume(4)
    history.join(step=4)
    for until, is_known in ((4, False), (5, False), (6, True)):
        history.work(until=until)
        _, shown = progress(job, history)
        assert shown.step == until
        assert (shown.eta_s is not None, shown.policy_units_per_s is not None) == (is_known, is_known)


def test_the_live_rate_is_that_of_the_summary_and_goes_when_steps_stay_away(job, history):
    history.join()
    history.work()
    follower, shown = progress(job, history)
    main = [timed for timed in follower.steps if timed.record.step > 3]
    assert shown.policy_units_per_s == follower.trained_per_s(main)
    assert progress(job, history, later_s=1000.0)[1].policy_units_per_s is None
