import asyncio

from cosmos_core.protocols import EnvironmentContext, Turn
from cosmos_core.types import Prompt
from cosmos_environment_calculator.plugin import Calculator, CalculatorOptions


def answer(text, **options):
    async def play():
        calculator = Calculator(CalculatorOptions(**options), EnvironmentContext(name="calculator", seed=0))
        assert await calculator.reset(Prompt(text="What is 34 times 56?"), 0) is None
        turn = await calculator.step(text)
        await calculator.close()
        return turn

    return asyncio.run(play())


def test_the_last_line_asks_for_a_value():
    turn = answer("Let me see.\n calc: 12*(3+4)= \n\n")
    assert turn == Turn(observation="84\n", role="tool", reward=1.0, detail="12*(3+4)=84")
    assert answer("calc: 1+1").observation == "2\n"


def test_any_other_turn_is_the_last():
    for text in ["", " \n", "#### 84", "calc: 1+1=\n#### 2", "I say calc: 1+1="]:
        assert answer(text) == Turn(done=True)


def test_a_wrong_expression_is_answered_with_what_is_wrong_and_counts_for_nothing():
    turn = answer("calc: 12*(3+=")
    assert (turn.observation, turn.done, turn.reward) == ("error: it ends too early\n", False, 0.0)
    assert answer("calc:").observation == "error: it ends too early\n"


def test_the_prefix_is_an_option():
    assert answer("=> 2*3", prefix="=>").observation == "6\n"
    assert answer("calc: 2*3=", prefix="=>").done
