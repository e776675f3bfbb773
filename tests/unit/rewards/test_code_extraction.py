"""Which block of an answer is the program; fences are compared with a CommonMark parser (a dependency of rich)."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from expensive import examples
from patience import processor_time
from toolyard.errors import ConfigError
from toolyard.rewards.code.extraction import extract_code
from toolyard.rewards.code.protocol import ExtractedCode

PYTHON = "```python\nprint(1)\n```\n"
CPP = "```cpp\nint main() {}\n```\n"
BARE = "```\nprint(2)\n```\n"
BASH = "```bash\npython3 main.py\n```\n"
OUTPUT = "```text\n42\n```\n"


# One block


def test_the_program_is_what_the_fences_enclose():
    extracted = extract_code(f"Here it is:\n\n{PYTHON}\nIt prints 1.")
    assert extracted == ExtractedCode(code="print(1)\n", language="python", blocks=1, chosen=0, unclosed=False)


@pytest.mark.parametrize(
    ("info", "language"),
    [
        ("", None),
        ("python", "python"),
        ("Python", "python"),
        ("py", "python"),
        ("python3", "python"),
        ("python3.11", "python"),
        ("py3", "python"),
        (" python ", "python"),
        ('python title="x.py"', "python"),
        ("python:main.py", "python"),
        ("python,linenos", "python"),
        ("python{1,3}", "python"),
        ("{.python}", "python"),
        ("{.python .numberLines}", "python"),
        ("{#solution .python}", "python"),
        ("{python}", "python"),
        ("{r, echo=FALSE}", "R"),
        ("language-python", "python"),
        ("c++", "cpp"),
        ("c++17", "cpp"),
        ("cpp20", "cpp"),
        ("C#", "csharp"),
        ("js", "nodejs"),
        ("sh", "bash"),
        ("haskell", None),
        ("text", None),
        ("3", None),
        ("{}", None),
        ("{", None),
        ("=", None),
    ],
)
@pytest.mark.parametrize("fence", ["```", "~~~"])
def test_the_language_is_read_from_the_fence(fence, info, language):
    extracted = extract_code(f"{fence}{info}\nx\n{fence}")
    assert (extracted.code, extracted.language) == ("x\n", language)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("````python\n```\nx\n```\n````", "```\nx\n```\n"),
        ("~~~~\n~~~\nx\n~~~~~", "~~~\nx\n"),
        ("~~~\n```\nx\n~~~", "```\nx\n"),
        ("```\n~~~\nx\n```", "~~~\nx\n"),
        ("```\nx\n``` \t", "x\n"),
        ("```\nx\n``` python\ny\n```", "x\n``` python\ny\n"),
        ("   ```\n   a\n     b\n c\n   ```", "a\n  b\nc\n"),
        ("```\nx\n   ```", "x\n"),
        ("```\nx\n    ```\n```", "x\n    ```\n"),
        ("```\r\nx\r\ny\r\n```\r\n", "x\ny\n"),
        ("```\rx\r```", "x\n"),
        ("text\n```\nx\n```", "x\n"),
        ("<answer>\n```\nx\n```\n</answer>", "x\n"),
        ("``` x ``` y\n```\nx\n```", "x\n"),
        ("```python\n\n\nx\n\n```", "\n\nx\n\n"),
        ("~~~ a ``` ~~~\nx\n~~~", "x\n"),
        ("1. Code:\n\n    ```python\n    if x:\n        y\n    ```", "if x:\n    y\n"),
        ("1. Code:\n   - so\n\n     ```python\n     x\n     ```", "x\n"),
        ("- ```python\n  x\n  ```", "x\n"),
        ("1. Code:\n   ```python\nx\n```\n", "x\n"),
        ("-\t```python\n\tx\n\t\ty\n\t```", "x\n\ty\n"),
        ("1.  ```\n\tx\n    ```", "x\n"),
    ],
)
def test_fences_are_commonmarks(answer, code):
    assert extract_code(answer).code == code


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "print(1)",
        "Use ```print(1)``` here",
        "code: ```python\nx",
        "``\nx\n``",
        "~~\nx\n~~",
        "    ```\n    x\n    ```",
        "\t```\n\tx\n\t```",
        "```x```\n",
        "1. Code:\n\n          ```\n          x\n          ```",
        "- item\n\nno longer\n\n    ```\n    x\n    ```",
        "```python\n```",
        "```python\n   \n\n```",
        "```",
        "`` ` ``",
    ],
)
def test_there_is_no_program_without_a_block_of_code(answer):
    extracted = extract_code(answer)
    assert (extracted.code, extracted.chosen, extracted.language) == (None, None, None)


def test_a_block_that_was_cut_off_is_used_and_flagged():
    assert extract_code("```python\nx\ny") == ExtractedCode("x\ny\n", "python", blocks=1, chosen=0, unclosed=True)
    assert extract_code("```python\nx\n").code == "x\n"
    assert not extract_code("```python\nx\n```").unclosed
    assert extract_code(f"{PYTHON}\n```python\nx = (", block="first").unclosed is False


# Several blocks


@pytest.mark.parametrize(
    ("answer", "language", "chosen"),
    [
        (PYTHON + BARE, "python", 0),
        (BARE + PYTHON, "python", 1),
        (BARE + OUTPUT, "python", 0),
        (BARE + CPP, "python", 0),
        (CPP + OUTPUT, "python", 0),
        (OUTPUT, "python", 0),
        (PYTHON + CPP, "cpp", 1),
        (CPP + PYTHON, "c++", 0),
        (PYTHON + CPP, "py", 0),
        (PYTHON + BASH, "bash", 1),
        ("```haskell\nx\n```\n" + BARE, "Haskell", 0),
        (PYTHON + PYTHON, "python", 1),
        (PYTHON + BASH + OUTPUT, None, 0),
        (PYTHON + BARE, None, 0),
        (BASH + BARE + OUTPUT, None, 1),
        (BASH + OUTPUT, None, 0),
        (PYTHON + CPP + BASH, None, 1),
        (OUTPUT + "```output\n1\n```", None, 1),
        (PYTHON + "```python\n```\n", None, 0),
        (PYTHON + "```", None, 0),
    ],
)
def test_the_block_is_chosen_by_its_language(answer, language, chosen):
    assert extract_code(answer, language=language).chosen == chosen


@pytest.mark.parametrize(
    ("block", "code", "chosen"),
    [
        ("last", "c\n", 3),
        ("first", "a\n", 0),
        ("longest", "bbb\n", 2),
        ("joined", "a\n\nbbb\n\nc\n", 3),
    ],
)
def test_several_blocks_in_the_language(block, code, chosen):
    answer = "```py\na\n```\n```text\nlonger than all\n```\n```python\nbbb\n```\n```python3\nc\n```"
    extracted = extract_code(answer, language="python", block=block)
    assert (extracted.code, extracted.chosen, extracted.blocks) == (code, chosen, 4)


def test_joined_blocks_are_in_one_language():
    assert extract_code(PYTHON + CPP + PYTHON, block="joined").code == "print(1)\n\nprint(1)\n"
    assert extract_code(PYTHON + CPP, block="joined").language == "cpp"
    assert extract_code(PYTHON + "```python\ny", block="joined").unclosed


def test_the_last_of_the_longest_is_taken():
    assert extract_code("```\nab\n```\n```\ncd\n```", block="longest").code == "cd\n"


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match=r"'best'.*'longest'"):
        extract_code(PYTHON, block="best")  # type: ignore[arg-type]


# Reasoning


@pytest.mark.parametrize(
    ("answer", "code", "chosen", "blocks"),
    [
        (f"<think>\n{PYTHON}</think>\n{BARE}", "print(2)\n", 1, 2),
        (f"{PYTHON}</think>\n{BARE}", "print(2)\n", 1, 2),
        ("<think>\n```python\nx = (\n</think>\n" + BARE, "print(2)\n", 1, 2),
        (f"<think>hm</think>{BARE}", "print(2)\n", 0, 1),
        (f"<think>\n{PYTHON}</think>\nIt is above.", "print(1)\n", 0, 1),
        (f"<think>\n{PYTHON}</think>\n```python\n```", "print(1)\n", 0, 2),
        (f"<think>a</think>{PYTHON}<think>b</think>{BARE}", "print(2)\n", 1, 2),
        ("```python\nprint('</think>')\n```\n" + OUTPUT, "print('</think>')\n", 0, 2),
        ("```python\nprint('</think>\\n')\n```\n" + OUTPUT, "print('</think>\\n')\n", 0, 2),
        (f"{PYTHON}The tag `</think>` ends it.\n{OUTPUT}", "print(1)\n", 0, 2),
    ],
)
def test_reasoning_is_passed_over_if_a_block_follows_it(answer, code, chosen, blocks):
    extracted = extract_code(answer, language="python")
    assert (extracted.code, extracted.chosen, extracted.blocks) == (code, chosen, blocks)


# Without fences


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("print(1)", "print(1)"),
        ("a\r\nb\n", "a\nb\n"),
        ("<think>hm</think>print(1)", "print(1)"),
        ("", None),
        (" \n", None),
        ("<think>hm</think>\n", None),
        ("```python\n```", None),
        (PYTHON, "print(1)\n"),
    ],
)
def test_an_answer_without_fences_can_be_the_program(answer, code):
    assert extract_code(answer, without_fences="whole").code == code


def test_a_whole_answer_names_no_block_and_no_language():
    assert extract_code("x", without_fences="whole") == ExtractedCode("x", None, blocks=0, chosen=None)


# Against CommonMark

LINES = st.lists(
    st.sampled_from(
        [
            *("", "x", "  y", "    z", "\tx", " \t", "```", "````", "~~~", "~~~~", "```python", "~~~ py", "  ```"),
            *("    ```", "\t```", "```  ", "``` a`b", "~~~ a`b", "   ~~~x", "```x ~~~", "`` `"),
        ]
    ),
    max_size=14,
)
"""No HTML, quotes or lists: there we differ on purpose."""


@given(LINES)
@example(["```", "x"])
@example(["  ```", "\tx", "  ```"])
@settings(max_examples=examples(200), deadline=None)
def test_blocks_are_those_of_a_commonmark_parser(lines):
    text = "".join(f"{line}\n" for line in lines)
    fences = [token for token in MarkdownIt("commonmark").parse(text) if token.type == "fence"]
    extracted = extract_code(text, block="first", language="no such")
    assert extracted.blocks == len(fences)
    if extracted.chosen is not None:
        assert extracted.code == fences[extracted.chosen].content
    written = [fence.content for fence in fences if fence.content.strip()]
    assert extracted.code in written or not written


LISTS = st.lists(
    st.sampled_from(["1. one", "- a", "  - b", "", "", "text", "   more"]).map(lambda line: [line])
    | st.integers(0, 9).map(lambda n: [" " * n + "```py", " " * n + "code", " " * n + "```"]),
    max_size=6,
)


@given(LISTS)
@settings(max_examples=examples(150), deadline=None)
def test_in_lists_every_block_that_commonmark_sees_is_found(parts):
    # An empty line before each part: lazy continuation lines of paragraphs are not supported.
    text = "\n\n".join("\n".join(part) for part in parts)
    fences = [token for token in MarkdownIt("commonmark").parse(text) if token.type == "fence"]
    extracted = extract_code(text, block="joined")
    assert extracted.blocks == len(fences)
    assert extracted.code == ("\n".join(fence.content for fence in fences) or None)


@given(st.text(alphabet="`~ \n\r\tax{}.</think>", max_size=80))
@settings(max_examples=examples(150), deadline=None)
def test_any_text_gives_code_that_is_in_it(text):
    extracted = extract_code(text, without_fences="whole")
    if extracted.code is not None:
        assert extracted.code.strip()
        assert set(extracted.code) <= set(text.replace("\r", "\n")) | {"\n", " "}
    assert extracted.chosen is None or extracted.chosen < extracted.blocks


# Size


@pytest.mark.parametrize(
    "answer",
    [
        "`" * 250_000,
        "~" * 250_000,
        "```\n" * 60_000,
        "``` `\n" * 40_000,
        "`\n" * 125_000,
        "\n" * 250_000,
        "x\n" * 125_000,
        "- " * 125_000,
        "- x\n" * 60_000,
        " " * 250_000 + "```",
        "\t" * 125_000 + "```",
        "```py\n" + "\t" * 125_000 + "x",
        " ```\n" + (" " * 1000 + "```x\n") * 1000,
        "</think>" * 25_000,
        "```python\nx\n```\n" * 12_000,
        "".join(f"```word{n}\nx\n```\n" for n in range(10_000)),
        "```{" + "." * 250_000,
        "```" + "{" * 250_000,
    ],
    ids=lambda answer: repr(answer[:14]),
)
def test_a_long_text_of_any_kind_takes_linear_time(answer):
    started = time.process_time()
    extract_code(answer, block="joined")
    assert time.process_time() - started < processor_time(2)
