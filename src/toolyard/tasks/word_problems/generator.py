"""Arithmetic word problems generated from templates: any number of them, offline, with solutions.

A small model can learn tool use from them: one to three steps with `+ - * //`, whole numbers up to a few hundred,
answers of at least 0. A row has GSM8K's format, with the Python program that computes its answer:

    {"id": "made-7-0", "question": …, "answer": "12 + 5 = 17\n#### 17", "program": "had = 12\n…", "template": …, …}

The same seed gives the same rows everywhere, and a longer list starts with the rows of a shorter one. `train` and
`unseen` share no template: what is learned on one and works on the other was not memorized.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from toolyard.errors import ConfigError
from toolyard.messages import JSON
from toolyard.tasks.word_problems.templates import TRAIN, Template
from toolyard.tasks.word_problems.unseen import UNSEEN

SOURCE = "toolyard/made-problems"
"""The data source of the rows."""
TOOL, ARGUMENT = "code_interpreter", "code"
"""The tool that a teacher calls, and its argument."""

_SPLITS = {"train": TRAIN, "unseen": UNSEEN}
_PREFIX = {"train": "made", "unseen": "unseen"}
"""Prefix of the ids of each split."""
_PHRASES = re.compile(r"\[([^\[\]]*)\]")
_FIELD = re.compile(r"\{(\w+)\}")
_NAME = re.compile(r"[a-z_]+")
_TRIES = 200
"""Maximum draws until a question is new. Every template has far more than thousands."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question and its solution."""

    template: str
    question: str
    worked: str
    """The computation in numbers: `2 * 3 = 6. 12 - 6 = 6.`"""
    program: str
    """Python that prints the answer: a line for each number, in the order of the question, and for each step."""
    answer: int


def problems(count: int, *, seed: int = 0, split: str = "train") -> Iterator[Problem]:
    """Generate `count` problems of a split, without duplicates, using all templates about equally often.

    Raises:
        ConfigError: there is no such split; or, while iterating, there are fewer distinct questions than `count`.
    """
    rng = random.Random(f"toolyard problems {split} {seed}")  # noqa: S311 - must be the same everywhere
    return distinct(templates_of(split), count, rng)


def distinct(templates: Sequence[Template], count: int, rng: random.Random) -> Iterator[Problem]:
    """Generate `count` problems from `templates`, without duplicates, using all templates about equally often.

    Raises:
        ConfigError: there are fewer distinct questions than `count`.
    """
    asked: set[str] = set()
    deck: list[Template] = []
    for made in range(count):
        if not deck:
            deck = _shuffled(rng, templates)
        template = deck.pop()
        for _ in range(_TRIES):
            problem = draw(template, rng)
            if problem.question not in asked:
                break
        else:
            raise ConfigError(
                f"count {count}: after {made} problems template {template.name!r} has no new question; ask for fewer"
            )
        asked.add(problem.question)
        yield problem


def rows(count: int, *, seed: int = 0, split: str = "train") -> Iterator[JSON]:
    """Generate the problems as rows of a task file. Ids are unique across all seeds and splits."""
    for number, problem in enumerate(problems(count, seed=seed, split=split)):
        yield {
            "id": f"{_PREFIX[split]}-{seed}-{number}",
            "question": problem.question,
            "answer": f"{problem.worked}\n#### {problem.answer}",
            "data_source": SOURCE,
            "program": problem.program,
            "template": problem.template,
        }


def templates_of(split: str) -> tuple[Template, ...]:
    """Return the templates of a split; splits share none.

    Raises:
        ConfigError: there is no such split.
    """
    if split not in _SPLITS:
        raise ConfigError(f"split {split!r}: expected one of {', '.join(_SPLITS)}")
    return _SPLITS[split]


def teacher_turns(row: Mapping[str, Any]) -> list[str]:
    """Return a teacher's turns for a row: a call of the code interpreter in Hermes' syntax, then the answer."""
    call = json.dumps({"name": TOOL, "arguments": {ARGUMENT: row["program"]}}, ensure_ascii=False)
    return [f"<tool_call>\n{call}\n</tool_call>", f"#### {row['answer'].rpartition('#### ')[2]}"]


def draw(template: Template, rng: random.Random) -> Problem:
    """Draw a random problem from `template`."""
    numbers: dict[str, int] = {}
    for name, drawn in template.numbers.items():
        numbers[name] = _value(drawn, numbers) if isinstance(drawn, str) else _between(rng, *drawn)
    chosen = {phrases: _one_of(rng, phrases.split("|")) for phrases in dict.fromkeys(_PHRASES.findall(template.text))}
    text = _PHRASES.sub(lambda found: chosen[found[1]], template.text)
    mentioned = list(dict.fromkeys(name for name in _FIELD.findall(text) if name in numbers))
    question = text.format(**_words(rng), **numbers)
    known = {name: numbers[name] for name in mentioned}
    program = [f"{name} = {value}" for name, value in known.items()]
    worked: list[str] = []
    for name, expression in template.steps.items():
        program.append(f"{name} = {expression}")
        worked.append(_in_numbers(expression, known))
        known[name] = _value(expression, known)
    program.append(f"print({template.answer})")
    worked.append(_in_numbers(template.answer, known))
    answer = _value(template.answer, known)
    return Problem(template.name, question[0].upper() + question[1:], " ".join(worked), "\n".join(program), answer)


# Randomness -----------------------------------------------------------------------------------------------------------
# Uses `random()` only, the one method whose values Python guarantees for a seed.


def _between(rng: random.Random, least: int, most: int) -> int:
    return least + int(rng.random() * (most - least + 1))


def _one_of(rng: random.Random, choices: Sequence[str]) -> str:
    return choices[_between(rng, 0, len(choices) - 1)]


def _two_of(rng: random.Random, choices: Sequence[str]) -> tuple[str, str]:
    first = _between(rng, 0, len(choices) - 1)
    second = _between(rng, 0, len(choices) - 2)
    return choices[first], choices[second + (second >= first)]


def _shuffled(rng: random.Random, templates: Sequence[Template]) -> list[Template]:
    return sorted(templates, key=lambda _: rng.random())


# Words ----------------------------------------------------------------------------------------------------------------


def _words(rng: random.Random) -> dict[str, str]:
    things, boxes, people = _listed(THINGS), _listed(BOXES), _people()
    first, second = _two_of(rng, list(people))
    he = people[first]
    him, his = ("him", "his") if he == "he" else ("her", "her")
    thing, other = _two_of(rng, list(things))
    box = _one_of(rng, list(boxes))
    red, blue = _two_of(rng, COLOURS.split())
    days = DAYS.split()
    monday = _between(rng, 0, 4)
    friday = _between(rng, monday + 1, 5)
    return {
        "A": first,
        "B": second,
        "he": he,
        "He": he.capitalize(),
        "him": him,
        "his": his,
        "His": his.capitalize(),
        "thing": thing,
        "things": things[thing],
        "other": other,
        "others": things[other],
        "box": box,
        "boxes": boxes[box],
        "red": red,
        "blue": blue,
        "Monday": days[monday],
        "Friday": days[friday],
    }


@cache
def _listed(words: str) -> dict[str, str]:
    """Return plurals, by word."""
    pairs = (word.partition("/") for word in words.split())
    return {one: many or f"{one}s" for one, _, many in pairs}


@cache
def _people() -> dict[str, str]:
    return {name: pronoun for pronoun, names in NAMES.items() for name in names.split()}


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _value(expression: str, numbers: Mapping[str, int]) -> int:
    return eval(expression, {"__builtins__": {}}, dict(numbers))  # noqa: S307 - a template's own, of this package


def _in_numbers(expression: str, numbers: Mapping[str, int]) -> str:
    written = _NAME.sub(lambda found: str(numbers[found[0]]), expression)
    return f"{written} = {_value(expression, numbers)}."


# Words to fill into templates.


NAMES = {
    "he": (
        "Adam Ahmed Ben Carlos Daniel David Diego Emil Ethan Felix Finn George Hassan Henry Hugo Ivan Jack Jamal Jorge "
        "Kevin Leo Liam Luca Marco Max Milan Nikhil Noah Oliver Oscar Paul Peter Rafael Ravi Robin Samuel Simon Theo "
        "Victor Wei William Yuki"
    ),
    "she": (
        "Alice Amina Anna Bella Carla Chloe Clara Daisy Elena Ella Emma Fatima Freya Grace Hannah Iris Ivy Jana Julia "
        "Kate Laila Lucy Maria Maya Megan Nina Nora Olivia Petra Priya Rachel Ruby Sofia Stella Tanya Uma Vera Wendy "
        "Yara Zainab"
    ),
}
"""By pronoun."""
THINGS = (
    "apple pear peach/peaches orange lemon mango banana cookie muffin pancake sandwich/sandwiches candy/candies egg "
    "carrot potato/potatoes tomato/tomatoes onion book comic magazine pencil crayon marker eraser notebook envelope "
    "stamp sticker card coin button bead shell stone marble balloon ball doll puzzle kite toy brick ribbon candle "
    "cup plate spoon bowl towel shirt sock scarf/scarves hat flower rose tulip seed leaf/leaves feather photo "
    "ticket badge bottle battery/batteries key lamp"
)
"""With the plural, if it is irregular."""
BOXES = "box/boxes bag basket jar crate tray packet carton bucket"
COLOURS = "red blue green yellow white black orange purple pink brown"
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
