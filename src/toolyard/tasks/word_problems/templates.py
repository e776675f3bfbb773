"""The training templates of `generator`: the text of a problem, and how to compute its answer.

In a text, `{a number}` and `{a word}` are filled in, and one option of `[this|that]` is chosen, the same everywhere.
Words: `{A}`, `{B}` people, and `{he}`, `{him}`, `{his}`, `{He}`, `{His}` for A; `{thing}`, `{things}` and `{other}`,
`{others}` two kinds of objects; `{box}`, `{boxes}` their containers; `{red}`, `{blue}` two colors; `{Monday}`,
`{Friday}` two days of a week.

Numbers are drawn in order: `(least, most)`, or an expression of those before, so that divisions have no remainder and
nothing drops below zero. Numbers that do not occur in the text are only used by others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Drawn = tuple[int, int] | str
"""The minimum and the maximum, or an expression of the numbers before."""


@dataclass(frozen=True, slots=True)
class Template:
    """One kind of question; its problems differ in numbers, words and phrases."""

    name: str
    text: str
    numbers: Mapping[str, Drawn]
    answer: str
    """An expression of numbers and steps, in Python."""
    steps: Mapping[str, str] = field(default_factory=dict[str, str])
    """Intermediate results, in order."""


TRAIN = (
    # One step ---------------------------------------------------------------------------------------------------------
    Template(
        "gets-more",
        "{A} [has|owns|collected] {had} {things}. [Then {B} gives|Later {B} brings] {him} {more} more. How many "
        "{things} does {A} have [now|in all|altogether]?",
        {"had": (3, 120), "more": (2, 90)},
        "had + more",
    ),
    Template(
        "two-people-together",
        "{A} [picked|found|counted] {first} {things} and {B} [picked|found|counted] {second}. How many {things} [did "
        "they get|were there] [together|in total]?",
        {"first": (3, 150), "second": (3, 150)},
        "first + second",
    ),
    Template(
        "uses-some",
        "[There were|{A} had] {had} {things} in [a|the] {box}. {A} [took out|removed|used] {used} of them. How many "
        "{things} [are left|are still there|remain]?",
        {"used": (2, 90), "rest": (1, 90), "had": "used + rest"},
        "had - used",
    ),
    Template(
        "gives-away",
        "{A} [bought|made|had] {had} {things} and [gave|sold] {given} of them to {B}. How many {things} does {A} "
        "[have left|still have]?",
        {"given": (2, 80), "rest": (1, 120), "had": "given + rest"},
        "had - given",
    ),
    Template(
        "boxes-of-things",
        "[There are {each} {things} in every {box}.|Every {box} holds {each} {things}.] {A} [fills|packs|carries] "
        "{count} {boxes}. How many {things} [is that|are in the {boxes}] [in total|altogether]?",
        {"each": (2, 30), "count": (2, 15)},
        "each * count",
    ),
    Template(
        "price-of-many",
        "[Each|Every|One] {thing} [costs|is sold for] {price} dollars. {A} [buys|wants to buy|orders] {count} "
        "{things}. How [much|many dollars] [does {he} pay|does that cost]?",
        {"price": (2, 40), "count": (2, 20)},
        "price * count",
    ),
    Template(
        "shared-equally",
        "{A} [divides|shares out|splits] {total} {things} equally among {people} "
        "[children|neighbours|players|guests]. How many {things} does [each|every one] of them [get|receive]?",
        {"people": (2, 12), "each": (2, 25), "total": "people * each"},
        "total // people",
    ),
    Template(
        "packed-into-boxes",
        "{A} [packs|puts] {total} {things} into {boxes}, {each} {things} in each {box}. How many {boxes} [does {he} "
        "need|are filled]?",
        {"each": (2, 20), "count": (2, 20), "total": "each * count"},
        "total // each",
    ),
    Template(
        "how-many-more",
        "{A} [has|owns] {larger} {things}, [and|but] {B} [has|owns] only {smaller}. How many more {things} [does {A} "
        "have|has {A}] than {B}?",
        {"smaller": (3, 90), "gap": (1, 80), "larger": "smaller + gap"},
        "larger - smaller",
    ),
    Template(
        "two-colours",
        "[In a {box} there are|{A} counts] {total} {things}. {first} of them are {red} and the [others|rest] are "
        "{blue}. How many {things} are {blue}?",
        {"first": (2, 90), "second": (2, 90), "total": "first + second"},
        "total - first",
    ),
    Template(
        "times-as-many",
        "{A} has {fewer} {things}. {B} has {times} times as many. How many {things} does {B} have?",
        {"fewer": (2, 40), "times": (3, 9)},
        "fewer * times",
    ),
    Template(
        "minutes-each-day",
        "{A} [practises the piano|runs|reads|draws] for {minutes} minutes [every|each] day. How many minutes is that "
        "in {days} days?",
        {"minutes": (5, 60), "days": (2, 14)},
        "minutes * days",
    ),
    Template(
        "age-later",
        "{A} is {age} years old [now|today]. How old will {he} be in {years} years?",
        {"age": (4, 70), "years": (2, 30)},
        "age + years",
    ),
    Template(
        "fewer-than",
        "{A} [won|scored] {more} points in a game. {B} [won|scored] {fewer} points fewer. How many points did {B} get?",
        {"fewer": (2, 40), "rest": (1, 90), "more": "fewer + rest"},
        "more - fewer",
    ),
    # Two steps --------------------------------------------------------------------------------------------------------
    Template(
        "three-numbers",
        "{A} [read|copied|wrote|typed] {first} pages on {Monday}, {second} on {Friday} and {third} on the day after. "
        "How many pages is that [in total|altogether]?",
        {"first": (3, 90), "second": (3, 90), "third": (3, 90)},
        "first + second + third",
    ),
    Template(
        "three-kinds",
        "[On a table lie|{A} bought|{A} packed] {first} {things}, {second} {others} and {third} pens. How many "
        "objects are there [in total|altogether|in all]?",
        {"first": (2, 60), "second": (2, 60), "third": (2, 60)},
        "first + second + third",
    ),
    Template(
        "gets-and-gives",
        "{A} had {had} {things}. {He} [got|received|bought] {more} more and then [lost|sold|gave away] {gone}. How "
        "many {things} does {A} have [now|in the end]?",
        {"had": (5, 90), "more": (3, 60), "gone": (2, 7)},
        "had + more - gone",
    ),
    Template(
        "sold-twice",
        "A [shop|stall|kiosk] had {stock} {things} [in the morning|at first]. It sold {first} [before|until] lunch "
        "and {second} [after lunch|in the afternoon]. How many {things} [were left|did it still have] in the evening?",
        {"first": (3, 80), "second": (3, 80), "rest": (1, 90), "stock": "first + second + rest"},
        "stock - first - second",
    ),
    Template(
        "two-prices",
        "{A} buys {count} {things} [for|at] {price} dollars each and one {other} for {extra} dollars. How [much|many "
        "dollars] does {he} [pay|spend] [in all|altogether]?",
        {"count": (2, 12), "price": (2, 20), "extra": (1, 50)},
        "cost + extra",
        {"cost": "count * price"},
    ),
    Template(
        "change-back",
        "{A} buys {count} {things}. Each [costs|is] {price} dollars. {He} [pays with|hands over] {paid} dollars. How "
        "[much|many dollars] [is the change|does {he} get back]?",
        {"count": (2, 9), "price": (2, 15), "over": (1, 30), "paid": "count * price + over"},
        "paid - cost",
        {"cost": "count * price"},
    ),
    Template(
        "boxes-some-broken",
        "{A} [opened|bought] {count} {boxes} with {each} {things} [each|in each of them]. {gone} {things} were "
        "[broken|damaged|thrown away]. How many good {things} [are there|did {he} have]?",
        {"count": (2, 12), "each": (4, 25), "gone": (1, 7)},
        "total - gone",
        {"total": "count * each"},
    ),
    Template(
        "boxes-and-loose",
        "{A} has {count} {boxes} of {each} {things} and {loose} [loose|single|extra] {things}. How many {things} "
        "[does {he} have|are there] [in total|altogether]?",
        {"count": (2, 12), "each": (2, 25), "loose": (1, 40)},
        "total + loose",
        {"total": "count * each"},
    ),
    Template(
        "two-sorts-of-boxes",
        "In [a storeroom|the garage|a van] there are {big} [big|large] {boxes} with {inside} {things} each and "
        "{small} small ones with {few} {things} each. How many {things} [is that|are there] [in all|in total]?",
        {"big": (2, 9), "inside": (10, 30), "small": (2, 9), "few": (2, 9)},
        "big * inside + small * few",
    ),
    Template(
        "add-then-share",
        "{A} has {first} {things} and {B} has {second}. They [put them together|mix them] and share them equally "
        "among {people} people. How many {things} [does each person get|are there for each person]?",
        {"people": (2, 9), "each": (6, 20), "first": (2, 11), "second": "people * each - first"},
        "together // people",
        {"together": "first + second"},
    ),
    Template(
        "keeps-then-shares",
        "{A} has {total} {things}. {He} keeps {kept} for [a friend|later] and divides the rest equally "
        "[among|between] {people} [cousins|classmates|teams]. How many {things} does each get?",
        {"people": (2, 9), "each": (2, 15), "kept": (2, 30), "total": "people * each + kept"},
        "shared // people",
        {"shared": "total - kept"},
    ),
    Template(
        "twice-as-many-together",
        "{A} has {first} {things}. {B} has [twice|two times] as many. How many {things} do they have together?",
        {"first": (3, 90)},
        "first + second",
        {"second": "first * 2"},
    ),
    Template(
        "more-than-together",
        "{A} [has|found|made] {first} {things}. {B} [has|found|made] {more} more than {A}. How many {things} is that "
        "[together|for both of them]?",
        {"first": (3, 90), "more": (2, 50)},
        "first + second",
        {"second": "first + more"},
    ),
    Template(
        "fewer-than-together",
        "{A} [counted|found|sold] {first} {things}. {B} [counted|found|sold] {fewer} fewer than {A}. How many "
        "{things} is that [in all|altogether]?",
        {"fewer": (2, 30), "rest": (2, 60), "first": "fewer + rest"},
        "first + second",
        {"second": "first - fewer"},
    ),
    Template(
        "half-gone",
        "{A} had {had} {things}. {He} [gave half of them away|sold half of them|lost half of them] and then "
        "[bought|got] {more} more. How many {things} does {he} have now?",
        {"half": (2, 60), "had": "half * 2", "more": (2, 40)},
        "rest + more",
        {"rest": "had // 2"},
    ),
    Template(
        "rows-of-plants",
        "[A gardener plants|{A} plants|A farmer has] {rows} rows of {each} [cabbages|trees|bushes|flowers]. {gone} of "
        "them [dry out|do not grow|are dug up]. How many [are left|remain]?",
        {"rows": (2, 15), "each": (5, 25), "gone": (1, 9)},
        "planted - gone",
        {"planted": "rows * each"},
    ),
    Template(
        "weekly-savings",
        "{A} [has|already has] {start} dollars and [saves|puts aside] {weekly} dollars [every|each] week. How many "
        "dollars does {he} have after {weeks} weeks?",
        {"start": (5, 90), "weekly": (2, 25), "weeks": (2, 12)},
        "start + saved",
        {"saved": "weekly * weeks"},
    ),
    Template(
        "weeks-until",
        "{A} [wants|would like] a [bicycle|guitar|camera] for {price} dollars. {He} has {start} dollars and "
        "[earns|saves] {weekly} dollars [every|a] week. How many weeks [does it take|must {he} wait]?",
        {"weekly": (3, 25), "weeks": (2, 12), "start": (5, 60), "price": "start + weekly * weeks"},
        "missing // weekly",
        {"missing": "price - start"},
    ),
    Template(
        "hourly-pay",
        "{A} [earns|is paid] {rate} dollars [an hour|per hour]. {He} works {first} hours on {Monday} and {second} "
        "hours on {Friday}. How many dollars does {he} [earn|get] for [both days|this]?",
        {"rate": (5, 25), "first": (2, 8), "second": (2, 8)},
        "rate * hours",
        {"hours": "first + second"},
    ),
    Template(
        "bus-stops",
        "[A bus|A tram|A boat] starts with {start} passengers. At the first stop {off} get off and {on} get on. How "
        "many passengers are [on board|in it] [now|then]?",
        {"off": (2, 20), "rest": (3, 30), "start": "off + rest", "on": (2, 25)},
        "start - off + on",
    ),
    Template(
        "distance-per-hour",
        "[A van|A driver|A lorry] [goes|drives] {speed} kilometres [an hour|per hour] for {hours} hours and then "
        "{more} kilometres more. How many kilometres is that [in total|in all]?",
        {"speed": (20, 90), "hours": (2, 6), "more": (3, 60)},
        "driven + more",
        {"driven": "speed * hours"},
    ),
    Template(
        "pages-left",
        "{A} is reading a book of {pages} pages. {He} reads {daily} pages [a day|every day] for {days} days. How many "
        "pages [are left|does {he} still have to read]?",
        {"daily": (5, 30), "days": (2, 9), "rest": (3, 90), "pages": "daily * days + rest"},
        "pages - read",
        {"read": "daily * days"},
    ),
    Template(
        "rate-per-minute",
        "A machine [makes|packs|labels] {made} {things} in {minutes} minutes. How many {things} does it "
        "[make|finish|manage] in {longer} minutes?",
        {"minutes": (2, 9), "each": (2, 12), "made": "minutes * each", "longer": (10, 30)},
        "rate * longer",
        {"rate": "made // minutes"},
    ),
    Template(
        "average-of-three",
        "{A} [scores|gets] {first}, {second} and {third} points in three [games|rounds|quizzes]. What is {his} "
        "average [score|number of points]?",
        {"first": (3, 20), "second": (3, 20), "mean": (14, 20), "third": "mean * 3 - first - second"},
        "total // 3",
        {"total": "first + second + third"},
    ),
    Template(
        "fence-around",
        "A [field|garden|yard|playground] is {length} metres long and {width} metres wide. How many metres of fence "
        "[go|are needed to go] [around it|all around it]?",
        {"width": (4, 60), "over": (1, 40), "length": "width + over"},
        "2 * (length + width)",
    ),
    Template(
        "area-cost",
        "A [room|kitchen|terrace] is {length} metres long and {width} metres wide. [Tiles|Carpet|New flooring] for "
        "one square metre [costs|is] {price} dollars. How many dollars does the whole floor cost?",
        {"length": (3, 9), "width": (2, 8), "price": (2, 15)},
        "area * price",
        {"area": "length * width"},
    ),
    # Three steps ------------------------------------------------------------------------------------------------------
    Template(
        "given-to-each",
        "{A} had {had} {things}. {He} [put|placed] {each} of them [on|at] each of {places} [tables|desks|seats] and "
        "then found {more} more. How many {things} does {he} have [left|now]?",
        {"each": (2, 9), "places": (2, 9), "rest": (1, 30), "had": "each * places + rest", "more": (2, 30)},
        "had - each * places + more",
    ),
    Template(
        "profit",
        "{A} buys {count} {things} for {cost} dollars each and sells [all of them|them all] for {price} dollars each. "
        "How many dollars does {he} [gain|earn by that]?",
        {"count": (3, 20), "cost": (2, 20), "over": (1, 15), "price": "cost + over"},
        "count * gain",
        {"gain": "price - cost"},
    ),
    Template(
        "split-the-bill",
        "A group of {people} [friends|colleagues|tourists] [orders|buys] {meals} [pizzas|meals|salads] for {price} "
        "dollars each. [They pay equal shares.|They all pay the same.] How many dollars does each of them pay?",
        {"people": (2, 6), "factor": (1, 3), "meals": "people * factor", "price": (4, 20)},
        "total // people",
        {"total": "meals * price"},
    ),
)
