from cosmos_core.run.launch import Exit
from cosmos_core.run.supervisor import with_cause

GONE = "policy-0: policy-0 rank 1: its process (pid 7) ended without a word: killed, or out of memory?"


def test_what_ended_first_is_added_to_the_reason_once():
    # What ended first is added to the reason.
    lost = "the last policy replica was lost (policy-0: silent for 15 s)"
    killed = Exit(name="policy-0", code=-9, error="")
    assert with_cause(lost, killed) == f"{lost}\npolicy-0: killed by signal 9"
    assert with_cause("", killed) == "policy-0: killed by signal 9"

    # A killed follower is said once.
    assert with_cause(GONE, Exit(name="policy-0.1", code=-9, error="")) == GONE
    assert "policy-0.2: killed" in with_cause(GONE, Exit(name="policy-0.2", code=-9, error=""))

    # An error that the controller was told is said once.
    reason = "policy-0: out of memory"
    assert with_cause(reason, Exit(name="policy-0", code=1, error="out of memory")) == reason
