"""The templates that are kept out of training: other stories with the same kinds of steps."""

from __future__ import annotations

from toolyard.tasks.word_problems.templates import Template

UNSEEN = (
    Template(
        "hours-to-minutes",
        "{A}'s [trip|working day|hike|shift] [takes|lasts] {hours} hours. How many minutes is [that|this]?",
        {"hours": (2, 12)},
        "hours * 60",
    ),
    Template(
        "library-returns",
        "A library [lent|gave out] {lent} books on {Monday}. {back} of them [came back|were returned] by {Friday}. "
        "How many are [still out|not back yet]?",
        {"back": (3, 90), "rest": (2, 60), "lent": "back + rest"},
        "lent - back",
    ),
    Template(
        "wheels",
        "[In a yard|At a school|In a park] stand {bicycles} bicycles with two wheels each and {cars} cars with four "
        "wheels each. How many wheels are there [in total|altogether]?",
        {"bicycles": (2, 30), "cars": (2, 20)},
        "bicycles * 2 + cars * 4",
    ),
    Template(
        "eggs-in-trays",
        "[The hens of a farm lay|A farmer collects] {daily} eggs [every|each] day. After {days} days the eggs are put "
        "into cartons of {each}. How many cartons are [filled|needed]?",
        {"each": (4, 12), "factor": (1, 4), "daily": "each * factor", "days": (2, 9)},
        "eggs // each",
        {"eggs": "daily * days"},
    ),
    Template(
        "ribbon-pieces",
        "{A} cuts {count} pieces of {length} centimetres each from a [ribbon|rope|cable] of {total} centimetres. How "
        "many centimetres [are left|remain]?",
        {"count": (2, 9), "length": (5, 25), "rest": (1, 40), "total": "count * length + rest"},
        "total - cut",
        {"cut": "count * length"},
    ),
    Template(
        "three-classes",
        "[Three classes|Three groups] [go to|visit] a museum: {first}, {second} and {third} children. {adults} adults "
        "come along. How many people is that?",
        {"first": (12, 30), "second": (12, 30), "third": (12, 30), "adults": (2, 9)},
        "first + second + third + adults",
    ),
    Template(
        "temperature-rise",
        "At [dawn|sunrise|six o'clock] it is {start} degrees. The temperature rises by {rise} degrees until noon and "
        "falls by {fall} degrees until night. How many degrees is it [at night|then]?",
        {"start": (5, 20), "rise": (3, 15), "fall": (2, 7)},
        "start + rise - fall",
    ),
    Template(
        "cinema-tickets",
        "A [cinema|theatre] ticket costs {adult} dollars for adults and {child} dollars for children. How many "
        "dollars do {adults} adults and {children} children pay?",
        {"adult": (8, 20), "child": (3, 7), "adults": (2, 6), "children": (2, 9)},
        "adult * adults + child * children",
    ),
    Template(
        "water-tank",
        "There are {had} litres of water in a [barrel|tank|pool]. {A} pours in {count} buckets of {each} litres. How "
        "many litres are in it [now|then]?",
        {"had": (10, 150), "count": (2, 12), "each": (4, 15)},
        "had + poured",
        {"poured": "count * each"},
    ),
    Template(
        "third-of-class",
        "{A}'s [club|team|group] has {members} members. One third of them are [absent|ill|on holiday]. How many "
        "members are not [absent|ill|on holiday]?",
        {"third": (3, 30), "members": "third * 3"},
        "members - absent",
        {"absent": "members // 3"},
    ),
    Template(
        "younger-sister",
        "{A} is {age} years old. {His} sister is {younger} years younger. How old are they together?",
        {"younger": (1, 6), "rest": (2, 30), "age": "younger + rest"},
        "age + sister",
        {"sister": "age - younger"},
    ),
)
