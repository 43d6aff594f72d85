"""Programs run for another process, over its standard input."""

import json
import subprocess
import sys
import time

import psutil
import pytest

LIMITS = {"time_s": 60.0, "cpu_s": 5.0, "memory_bytes": 1 << 28, "output_bytes": 100}


@pytest.fixture
def process():
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "cosmos_reward_code"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def ask(process, asked):
    process.stdin.write(f"{asked if isinstance(asked, str) else json.dumps(asked)}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def test_programs_are_run_one_after_another_and_what_is_no_request_is_told(process, subtests):
    request = {"program": "print(input(), __name__)", "input": "7", "name": "solution", "limits": LIMITS}
    ran = {"ending": "finished", "code": 0, "output": "7 solution\n", "errors": ""}
    assert ask(process, request) == ran
    for wrong in ["", "{", "1", "{}", {**request, "limits": {"time_s": 1.0}}, {**request, "limits": None}]:
        with subtests.test(wrong=wrong):
            assert ask(process, wrong)["error"].startswith("a request is a JSON object of program, name, input and")
    assert ask(process, {**request, "program": "open('/etc/passwd')"})["ending"] == "failed"
    assert ask(process, request) == ran
    process.stdin.close()
    assert process.wait(20) == 0


def test_a_program_ends_with_the_process_that_serves_it(process):
    request = {"program": "import time; time.sleep(60)", "name": "solution", "limits": LIMITS}
    process.stdin.write(f"{json.dumps(request)}\n")
    process.stdin.flush()
    while not (children := psutil.Process(process.pid).children()):
        time.sleep(0.01)
    process.kill()
    children[0].wait(5)


def test_the_process_ends_with_the_one_that_started_it():
    code = (
        "import subprocess, sys, time\n"
        "served = subprocess.Popen([sys.executable, '-P', '-m', 'cosmos_reward_code'], stdin=0, stdout=-1)\n"
        "print(served.pid, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        served = psutil.Process(int(starter.stdout.readline()))
        while served.cpu_times().user < 0.05:
            time.sleep(0.01)
        time.sleep(1.0)
        starter.kill()
        served.wait(10)
