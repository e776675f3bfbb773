"""How calls are made, and how much of an answer the model gets."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pictures import png
from toolyard.images import image_of
from toolyard.tools import ToolResponse, open_instance, tool
from toolyard.tools.policy import CallPolicy, Keep, truncate

TEXT = "".join(f"line {number}\n" for number in range(1000))
MARK = re.compile(r"\[… (\d+) characters cut …\]")


def tokens(text: str) -> int:
    """As a tokenizer counts: words and single signs. Cutting inside a word makes two of one."""
    return len(re.findall(r"\w{1,4}|\s|[^\w\s]", text))


class TestTruncate:
    def test_what_fits_is_left_alone(self) -> None:
        assert truncate("short", 5) == ("short", False)

    def test_what_is_one_too_long_is_cut(self) -> None:
        text, cut = truncate("x" * 101, 100)
        assert cut
        assert len(text) <= 100

    def test_head(self) -> None:
        text, cut = truncate(TEXT, 200, Keep.HEAD)
        kept, mark = text.rsplit("\n", 1)
        assert cut
        assert TEXT.startswith(kept)
        assert MARK.fullmatch(mark)

    def test_tail(self) -> None:
        text, cut = truncate(TEXT, 200, Keep.TAIL)
        mark, kept = text.split("\n", 1)
        assert cut
        assert TEXT.endswith(kept)
        assert MARK.fullmatch(mark)

    def test_both(self) -> None:
        text, cut = truncate(TEXT, 200, Keep.BOTH)
        found = MARK.search(text)
        assert cut
        assert found
        head, tail = text[: found.start() - 1], text[found.end() + 1 :]
        assert TEXT.startswith(head)
        assert TEXT.endswith(tail)
        assert abs(len(head) - len(tail)) <= 1

    @pytest.mark.parametrize("keep", Keep)
    def test_the_mark_says_how_much_is_gone(self, keep: Keep) -> None:
        text, _ = truncate(TEXT, 500, keep)
        found = MARK.search(text)
        assert found
        kept = len(text) - len(found[0]) - (2 if keep is Keep.BOTH else 1)
        assert int(found[1]) == len(TEXT) - kept

    @pytest.mark.parametrize("keep", Keep)
    @pytest.mark.parametrize("measure", [len, tokens])
    def test_as_much_as_fits_is_kept(self, keep: Keep, measure: Any) -> None:
        text, _ = truncate(TEXT, 300, keep, measure)
        assert 290 <= measure(text) <= 300

    @pytest.mark.parametrize("keep", Keep)
    @given(text=st.text(max_size=300), limit=st.integers(1, 200))
    def test_the_result_is_never_longer_than_the_limit(self, keep: Keep, text: str, limit: int) -> None:
        shorten, cut = truncate(text, limit, keep)
        assert len(shorten) <= limit
        assert cut is (len(text) > limit)

    @pytest.mark.parametrize("keep", Keep)
    @given(text=st.text("ab .,\n", max_size=300), limit=st.integers(1, 100))
    def test_nor_in_tokens(self, keep: Keep, text: str, limit: int) -> None:
        shorten, cut = truncate(text, limit, keep, tokens)
        assert tokens(shorten) <= limit
        assert cut is (tokens(text) > limit)

    @pytest.mark.parametrize("keep", Keep)
    @pytest.mark.parametrize("limit", [1, 2, 10, 26])
    def test_a_limit_too_small_for_the_mark_is_kept_as_well(self, keep: Keep, limit: int) -> None:
        text, cut = truncate(TEXT, limit, keep)
        assert cut
        assert len(text) <= limit

    def test_a_tokenizer_is_asked_a_few_times_not_for_every_character(self) -> None:
        asked: list[int] = []

        def measure(text: str) -> int:
            asked.append(len(text))
            return tokens(text)

        truncate(TEXT, 100, Keep.BOTH, measure)
        assert len(asked) < 25

    def test_letters_of_any_language(self) -> None:
        text, _ = truncate("工具" * 100, 60)
        assert text.startswith("工具")
        assert text.endswith("工具")


class TestCallPolicy:
    @pytest.mark.parametrize(
        ("word", "keep"),
        [
            ("left", Keep.TAIL),
            ("right", Keep.HEAD),
            ("middle", Keep.BOTH),
            ("head", Keep.HEAD),
            ("tail", Keep.TAIL),
            ("both", Keep.BOTH),
        ],
    )
    def test_old_words_name_the_side_that_is_cut_new_ones_what_is_kept(self, word: str, keep: Keep) -> None:
        assert CallPolicy.model_validate({"keep": word}).keep is keep

    @pytest.mark.parametrize(
        "wrong",
        [
            {"keep": "centre"},
            {"keep": 3},
            {"timeout_seconds": 0},
            {"retries": -1},
            {"max_response_chars": 0},
            {"concurrency": 0},
            {"timeout": 3},
        ],
    )
    def test_nonsense_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            CallPolicy.model_validate(wrong)

    def test_limits_can_be_lifted(self) -> None:
        lifted = CallPolicy.model_validate({"timeout_seconds": None, "max_response_chars": None})
        assert lifted.timeout_seconds is None
        assert lifted.max_response_chars is None


class TestInACall:
    @staticmethod
    async def answer(policy: dict[str, Any], measure: Any = None) -> tuple[str, bool]:
        @tool(config={"call": policy})
        def talk() -> str:
            return TEXT

        async with open_instance(talk, "request") as instance:
            result = await instance.call("{}", measure=measure)
        return result.response.text or "", result.truncated

    async def test_a_long_answer_is_cut_to_characters(self) -> None:
        text, cut = await self.answer({"max_response_chars": 100, "keep": "right"})
        assert cut
        assert len(text) <= 100
        assert text.startswith("line 0\n")

    async def test_a_long_answer_is_cut_to_tokens_of_the_model(self) -> None:
        text, cut = await self.answer({"max_response_tokens": 50, "keep": "tail"}, tokens)
        assert cut
        assert tokens(text) <= 50
        assert text.endswith("line 999\n")

    async def test_both_limits_hold(self) -> None:
        text, _ = await self.answer({"max_response_chars": 200, "max_response_tokens": 40}, tokens)
        assert len(text) <= 200
        assert tokens(text) <= 40

    async def test_without_limits_nothing_is_cut(self) -> None:
        assert await self.answer({"max_response_chars": None}) == (TEXT, False)

    async def test_images_stay(self) -> None:
        picture = image_of(png()).as_json()

        @tool(config={"call": {"max_response_chars": 50}})
        def draw() -> Any:
            return ToolResponse(text=TEXT, image=[picture])

        async with open_instance(draw, "request") as instance:
            result = await instance.call("{}")
        assert result.truncated
        assert result.response.image == [picture]
