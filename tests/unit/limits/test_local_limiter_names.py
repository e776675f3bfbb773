"""The names of limiters in one process."""

from __future__ import annotations

import pytest

from toolyard.errors import LimitConflictError
from toolyard.limits.local import LocalLimiter


async def test_a_limiter_that_nobody_closed_takes_its_name_with_it() -> None:
    forgotten = LocalLimiter(3, name="forgotten")
    with pytest.raises(LimitConflictError):
        LocalLimiter(4, name="forgotten")
    async with forgotten.permit():
        pass
    del forgotten
    again = LocalLimiter(4, name="forgotten")
    assert again.limit == 4
    await again.close()


async def test_one_of_several_that_is_forgotten_leaves_the_others_their_permits() -> None:
    forgotten, kept = LocalLimiter(1, name="shared"), LocalLimiter(1, name="shared")
    permit = kept.permit()
    async with permit:
        del forgotten
        with pytest.raises(LimitConflictError):
            LocalLimiter(2, name="shared")
    await kept.close()
