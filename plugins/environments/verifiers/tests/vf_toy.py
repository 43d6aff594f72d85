"""An environment as an author of verifiers writes it: guess a number, told after each guess that it is too low."""

import asyncio

import verifiers.v1 as vf

__all__ = ["Guess", "Numbers"]


class Hints(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def hint(self, of: str) -> str:
        """Tell the number."""
        return f"not {of}"


class NumberConfig(vf.TaskConfig):
    hints: bool = False


class Number(vf.Task[vf.TaskData, vf.State, NumberConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Hints(vf.ToolsetConfig())] if config.hints else []

    @vf.reward(weight=2.0)
    async def found(self, task, trace) -> float:
        if task.name == "slow":
            await asyncio.sleep(60)
        return float((trace.branches[-1].messages[-1].content or "").strip() == task.name)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(len(trace.calls))


class NumbersConfig(vf.TasksetConfig):
    names: tuple[str, ...] = ("7", "5")
    task: NumberConfig = NumberConfig()
    endless: bool = False
    trained: bool = True


class Numbers(vf.Taskset[Number, NumbersConfig]):
    @property
    def bounded(self):
        return not self.config.endless

    def load(self):
        while True:
            for game, name in enumerate(self.config.names):
                if name == "broken":
                    raise OSError("no such file")
                data = vf.TaskData(name=name, prompt=f"Game {game}: guess.", system_prompt="Be brief.")
                yield Number(data, self.config.task)
            if self.bounded:
                return


class Guess(vf.Env[vf.SingleAgentEnvConfig]):
    async def setup(self, agents):
        agents.agent.trainable = self.config.taskset.trained

    async def run(self, task, agents):
        if task.data.name == "raises":
            raise RuntimeError("the game is lost")
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and said.last_reply < task.data.name:
                said = await talk.turn("Too low.")


if __name__ == "__main__":  # verifiers starts the servers of tools as programs
    Hints.run()
