"""planned = dumped + missing, or an error says what does not add up."""

from __future__ import annotations

import pytest

from toolyard.rollout.summary import Accounting, AccountingError, Groups


def test_what_adds_up_is_no_problem():
    books = Accounting(planned=3, before=1, dumped={"a"}, missing={"b": "stopped while it ran"})
    books.close(["a", "b"])
    books.check()
    assert str(books).startswith("3 planned = 2 in the dump (1 of them by an earlier run) + 1 missing")


@pytest.mark.parametrize(
    ("books", "told"),
    [
        (Accounting(planned=2, dumped={"a"}), "1 request disappeared: b"),
        (Accounting(planned=2, dumped={"a", "b"}, missing={"b": "x"}), "1 request both dumped and missing: b"),
        (Accounting(planned=2, dumped={"a", "b"}, problems=["a worker died"]), "a worker died"),
    ],
)
def test_what_does_not_add_up_is_named(books, told):
    books.close(["a", "b"])
    with pytest.raises(AccountingError, match=f"the run does not add up: {told}"):
        books.check()


def test_a_group_is_done_with_its_last_sample():
    groups = Groups(["a0", "a1", "b0", "b1", "c0", "c1"], 2, {"a1", "b0", "b1"})
    assert (groups.done, groups.total) == (1, 3)
    assert [groups.add(request_id) for request_id in ("b1", "a1", "b0")] == [False, True, True]
    assert groups.done == 3
