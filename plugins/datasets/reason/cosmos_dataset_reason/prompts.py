"""The making of prompts: the question and its choices, how to answer, and the answer that is imitated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cosmos_core.types import Message, Prompt
from cosmos_dataset_reason.options import QuestionOptions
from cosmos_dataset_reason.question import Question

BY_LETTER: Final = "Answer with the letter of the right choice."
IN_TAGS: Final = "Answer in the following format: <think> your reasoning </think> <answer> your answer </answer>."


def ask(question: Question, options: QuestionOptions, *, media: tuple[str, ...], labels: Iterable[str]) -> Prompt:
    """Make the prompt of a question about some media, with what is right and, where it is known, how to get there."""
    return Prompt(
        text=_text(question, options),
        reference=question.reference,
        demonstration=_demonstration(question, options),
        media=media,
        metadata={"labels": [*labels], "answer_kind": "choice" if question.choices else "free"},
    )


def in_tags(reasoning: str, answer: str) -> str:
    """A completion as `IN_TAGS` asks for it."""
    return f"<think>{reasoning}</think> <answer>{answer}</answer>"


def chat_with(options: QuestionOptions, *turns: Message) -> tuple[Message, ...]:
    """The turns, after the system turn of the options; a system turn of their own stands instead."""
    has_own = turns[0].role == "system"
    return turns if has_own or options.system is None else (Message(role="system", content=options.system), *turns)


def _text(question: Question, options: QuestionOptions) -> str | tuple[Message, ...]:
    lines = [question.text, *(f"({letter}) {text}" for letter, text in question.choices.items())]
    if options.instruction is None:
        lines += [BY_LETTER] * bool(question.choices) + [IN_TAGS] * options.thought
    elif options.instruction:
        lines.append(options.instruction)
    text = "\n".join(lines)
    return chat_with(options, Message(role="user", content=text)) if options.chat else f"{text}\n"


def _demonstration(question: Question, options: QuestionOptions) -> str | None:
    """The answer as it is asked for; None where that is with reasoning, and there is none."""
    answer = question.answers[0]
    if not options.thought:
        return answer
    return None if question.reasoning is None else in_tags(question.reasoning, answer)
