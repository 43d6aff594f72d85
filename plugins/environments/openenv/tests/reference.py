"""An echo on the real `openenv-core`: `python reference.py PORT`, with an interpreter that has it."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import field_validator


class EchoAction(Action):
    message: str
    times: int = 1

    @field_validator("times")
    @classmethod
    def few(cls, times):
        if times > 3:
            raise ValueError("too many")
        return times


class EchoObservation(Observation):
    message: str
    steps: int


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, task=None):
        self._steps = 0
        return EchoObservation(message=f"ready {seed} {task}", steps=0)

    def step(self, action, timeout_s=None):
        if action.message == "fail":
            raise RuntimeError("it failed")
        self._steps += 1
        said = action.message * action.times
        return EchoObservation(message=said, steps=self._steps, reward=len(said), done=action.message == "end")

    @property
    def state(self):
        return State(step_count=self._steps)


uvicorn.run(
    create_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=2),
    host="127.0.0.1",
    port=int(sys.argv[1]),
    ws_ping_interval=0.5,
    ws_ping_timeout=0.5,
    log_level="error",
)
