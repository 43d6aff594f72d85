"""Writes the tasks of the code agent: small Python functions with one defect each, examples and hidden tests.

Run it as: python recipes/data/repairs.py FOLDER

`repairs.jsonl` and `repairs-heldout.jsonl` are functions of one line with a wrong operator, for a tiny model that knows
nothing, and chats of a careless demonstrator, who sees that an example fails and mostly leaves it at that.
`python-repairs.jsonl` and `python-repairs-heldout.jsonl` are ordinary functions with any one defect, for models that
know Python. No function is in two files.
"""  # noqa: INP001 - a script beside the files of the recipes

from __future__ import annotations

import ast
import itertools
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

OPERATORS: Final = ("+", "-", "*", "//", "%")
NAMES: Final = "abcdehkmnpqrstuvwxyz"
NUM_TRAIN: Final = 360
NUM_HELDOUT: Final = 64
TOOLS: Final = [{"type": "function", "function": {"name": "write"}}]
"""As much of the tools as the recipe's terse template writes; the agent sends all of it."""


def main() -> None:
    """Write the files."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    draw = random.Random(0)  # noqa: S311 - these are no secrets
    functions = _lines(draw)
    _save(folder / "repairs-heldout.jsonl", [_task(draw, *next(functions)) for _ in range(NUM_HELDOUT)])
    chats = (chat for function in functions for chat in _chats(draw, *function))
    _save(folder / "repairs.jsonl", list(itertools.islice(chats, NUM_TRAIN)))
    for split, blocks in (("", ORDINARY[:-6]), ("-heldout", ORDINARY[-6:])):
        _save(folder / f"python-repairs{split}.jsonl", [row for block in blocks for row in _ordinary(block)])


def _save(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"{path}: {len(rows)} rows")  # noqa: T201 - it is what the script is for


def values_of(source: str, calls: Sequence[str]) -> list[str]:
    """What a function of this module gives for calls, as the code agent writes it."""
    module: dict[str, Any] = {}
    exec(source, module)  # noqa: S102 - the functions of this file, and their defects
    found = []
    for call in calls:
        try:
            found.append(repr(eval(call, module)))  # noqa: S307 - as above
        except Exception as error:  # noqa: BLE001 - any is a value
            found.append(f"{type(error).__name__}: {error}")
    return found


# -- functions of one line --------------------------------------------------------------------------------------------


def _line(names: Sequence[str], operator: str, addend: int) -> str:
    return f"def f({', '.join(names)}): return {names[0]} {operator} {names[1]} + {addend}"


def _lines(draw: random.Random) -> Iterator[tuple[Sequence[str], str, int]]:
    """Functions in no order, no two of which differ in the operator alone."""
    every = list(itertools.product(itertools.permutations(NAMES, 2), range(1, 10)))
    draw.shuffle(every)
    return ((names, draw.choice(OPERATORS), addend) for names, addend in every)


def _following(operator: str) -> str:
    return OPERATORS[(OPERATORS.index(operator) + 1) % len(OPERATORS)]


def _cases(draw: random.Random, names: Sequence[str], operator: str, addend: int) -> tuple[list[str], list[str]]:
    """Calls, and the values that they must have: no two operators agree on the first two."""
    while True:
        pairs = draw.sample([(a, b) for a in range(2, 10) for b in range(2, 10) if a != b], 5)
        calls = [f"f({a}, {b})" for a, b in pairs]
        shown = [tuple(values_of(_line(names, each, addend), calls[:2])) for each in OPERATORS]
        if len(set(shown)) == len(shown):
            return calls, values_of(_line(names, operator, addend), calls)


def _reference(source: str, calls: Sequence[str], values: Sequence[str], num_shown: int = 2) -> dict[str, Any]:
    cases = [list(case) for case in zip(calls, values, strict=True)]
    return {"source": source, "examples": cases[:num_shown], "tests": cases[num_shown:]}


def _question(source: str, examples: Sequence[Sequence[str]]) -> str:
    return "\n".join([source, *(f"{call} == {value}" for call, value in examples)])


def _task(draw: random.Random, names: Sequence[str], operator: str, addend: int) -> dict[str, Any]:
    wrong = draw.choice([each for each in OPERATORS if each != operator])
    source = _line(names, wrong, addend)
    reference = _reference(source, *_cases(draw, names, operator, addend))
    return {"messages": [{"role": "user", "content": _question(source, reference["examples"])}], "tools": TOOLS} | {
        "answer": _call(_line(names, operator, addend)),
        "task": reference,
    }


def _chats(draw: random.Random, names: Sequence[str], operator: str, addend: int) -> Iterator[dict[str, Any]]:
    """Chats at their beginning or after some tries; what is said next is the answer.

    Most are at their beginning, for these are short: of few functions a model learns the names by heart, and does not
    learn to copy them. After a failed example the demonstrator says `done` in two chats and goes on in a third, all
    else being equal, so that which it is cannot be learned by heart.
    """
    task = _task(draw, names, operator, addend)
    reference, messages = task["task"], task["messages"]
    calls, wanted = zip(*reference["examples"], strict=True)
    tried = next(each for each in OPERATORS if _line(names, each, addend) == reference["source"])
    failed: list[str] = []
    for turn in range(draw.choice([0, 0, 0, 0, 0, 1, 2, 3, 4])):
        tried = _following(tried)
        source = _line(names, tried, addend)
        values = values_of(source, calls)
        failed = [f"{c} is {v}, not {w}" for c, v, w in zip(calls, values, wanted, strict=True) if v != w]
        arguments = json.dumps({"source": source})
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "write", "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": (failed or ["all examples pass"])[0]})
        reference["source"] = source
        if not failed:
            break
    following = _call(_line(names, _following(tried), addend))
    for answer in [following] if len(messages) == 1 else ["done", "done", following] if failed else ["done"]:
        yield task | {"answer": answer}


def _call(source: str) -> str:
    arguments = json.dumps({"source": source})
    return f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'


# -- ordinary functions -----------------------------------------------------------------------------------------------


def _ordinary(block: str) -> list[dict[str, Any]]:
    """The tasks of a function: one for each defect that an example shows."""
    source, _, written = block.partition("\n# ")
    calls = written.split("; ")
    source = ast.unparse(ast.parse(source))
    values, tasks = dict(zip(calls, values_of(source, calls), strict=True)), {}
    for faulty in _faulty(source):
        given = zip(calls, values_of(faulty, calls), strict=True)
        failed = [call for call, value in given if value != values[call]]
        if failed:
            shown = [failed[0], next(call for call in calls if call != failed[0])]
            # Where one call alone shows the defect, it is among the tests, too.
            listed = [*shown, *(call for call in calls if call not in shown or (call in failed and len(failed) == 1))]
            reference = _reference(faulty, listed, [values[call] for call in listed])
            question = f"Repair this function.\n\n{_question(faulty, reference['examples'])}"
            tasks[faulty] = {"messages": [{"role": "user", "content": question}], "answer": source, "task": reference}
    return list(tasks.values())


def _faulty(source: str) -> Iterator[str]:
    """The function with one defect: another operator, a constant that is off by one, or arguments swapped."""
    for place in range(len(list(ast.walk(ast.parse(source))))):
        tree = ast.parse(source)
        if _damage(list(ast.walk(tree))[place]):
            yield ast.unparse(tree)


def _damage(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.Sub() | ast.Div() | ast.FloorDiv() | ast.Mod()):
            node.left, node.right = node.right, node.left
        case ast.BinOp() | ast.BoolOp() | ast.Compare(ops=[_]):
            operators = [node.ops[0]] if isinstance(node, ast.Compare) else [node.op]
            other = OTHERS.get(type(operators[0]))
            if other is None:
                return False
            if isinstance(node, ast.Compare):
                node.ops = [other()]
            else:
                node.op = other()
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            node.value = value + 1
        case ast.Call(args=[first, second]):
            node.args = [second, first]
        case _:
            return False
    return True


OTHERS: Final[Mapping[type, Any]] = {
    ast.Add: ast.Sub,
    ast.Mult: ast.Add,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.In: ast.NotIn,
    ast.And: ast.Or,
    ast.Or: ast.And,
}

ORDINARY: Final = """
def largest(values):
    found = values[0]
    for value in values[1:]:
        if value > found:
            found = value
    return found
# largest([1, 3, 2]); largest([5]); largest([-4, -2, -9]); largest([2, 2]); largest([7, 1, 1, 7])

def count_vowels(text):
    return sum(1 for letter in text.lower() if letter in 'aeiou')
# count_vowels('banana'); count_vowels('xyz'); count_vowels('AEIOU'); count_vowels(''); count_vowels('Queue')

def factorial(n):
    product = 1
    for factor in range(2, n + 1):
        product = product * factor
    return product
# factorial(4); factorial(0); factorial(1); factorial(6); factorial(2)

def is_prime(n):
    if n < 2:
        return False
    return all(n % divisor != 0 for divisor in range(2, n))
# is_prime(7); is_prime(2); is_prime(1); is_prime(9); is_prime(0); is_prime(13)

def clamp(value, low, high):
    return max(low, min(value, high))
# clamp(5, 0, 3); clamp(-2, 0, 3); clamp(2, 0, 3); clamp(0, 0, 0); clamp(9, -9, 9)

def mean(values):
    return sum(values) / len(values)
# mean([1, 2, 3]); mean([4]); mean([0, 1]); mean([-2, 2]); mean([5, 5, 8])

def is_palindrome(text):
    return text == text[::-1]
# is_palindrome('abba'); is_palindrome('ab'); is_palindrome(''); is_palindrome('racecar'); is_palindrome('aab')

def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
# fibonacci(6); fibonacci(1); fibonacci(0); fibonacci(10); fibonacci(2)

def gcd(a, b):
    return a if b == 0 else gcd(b, a % b)
# gcd(12, 18); gcd(7, 5); gcd(9, 0); gcd(100, 75); gcd(8, 8)

def digits_sum(n):
    return n if n < 10 else n % 10 + digits_sum(n // 10)
# digits_sum(123); digits_sum(9); digits_sum(0); digits_sum(1010); digits_sum(99)

def is_leap(year):
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
# is_leap(2000); is_leap(1900); is_leap(2024); is_leap(2023); is_leap(2100)

def second(values):
    return sorted(values)[1]
# second([3, 1, 2]); second([5, 4]); second([1, 1, 1]); second([9, 8, 7, 6]); second([-1, 0])

def area(width, height):
    return width * height
# area(3, 4); area(5, 1); area(0, 7); area(2, 2); area(6, 7)

def power(base, exponent):
    result = 1
    for _ in range(exponent):
        result = result * base
    return result
# power(2, 5); power(3, 2); power(7, 0); power(1, 9); power(10, 3)

def remove_at(values, index):
    return values[:index] + values[index + 1:]
# remove_at([1, 2, 3], 1); remove_at('abc', 0); remove_at([5], 0); remove_at('abcd', 3); remove_at([1, 1, 2], 2)

def evens(values):
    return [value for value in values if value % 2 == 0]
# evens([1, 2, 4]); evens([3]); evens([]); evens([0, -2, 7]); evens([10, 11, 12])

def celsius(fahrenheit):
    return (fahrenheit - 32) * 5 / 9
# celsius(212); celsius(32); celsius(-40); celsius(50); celsius(14)

def starts(text, prefix):
    return text[:len(prefix)] == prefix
# starts('python', 'py'); starts('python', 'on'); starts('', ''); starts('a', 'ab'); starts('abc', 'abc')

def running(values):
    totals = [0]
    for value in values:
        totals.append(totals[-1] + value)
    return totals[1:]
# running([1, 2, 3]); running([4, -4]); running([]); running([5]); running([1, 1, 1, 1])

def grade(points):
    if points >= 90:
        return 'A'
    if points >= 75:
        return 'B'
    return 'C'
# grade(90); grade(75); grade(89); grade(74); grade(100); grade(0)

def pairs(values):
    return [(values[i], values[i + 1]) for i in range(len(values) - 1)]
# pairs([1, 2, 3]); pairs('ab'); pairs([]); pairs([7]); pairs('abcd')

def distance(a, b):
    return abs(a[0] - b[0]) + abs(a[1] - b[1])
# distance((0, 0), (3, 4)); distance((1, 5), (2, 3)); distance((2, 2), (2, 2)); distance((-1, 0), (1, 0))

def triangle(n):
    return n * (n + 1) // 2
# triangle(4); triangle(1); triangle(0); triangle(7); triangle(10)

def has_sum(values, wanted):
    return any(a + b == wanted for i, a in enumerate(values) for b in values[i + 1:])
# has_sum([1, 2, 3], 5); has_sum([2], 4); has_sum([2, 2], 4); has_sum([], 0); has_sum([1, 5, 9], 14)
""".strip().split("\n\n")


if __name__ == "__main__":
    main()
