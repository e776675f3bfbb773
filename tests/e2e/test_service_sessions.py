"""Notebooks and sessions over real sockets, around a scripted session."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from serving import EchoSession, request, service, with_session


class TestNotebook:
    async def run(self, session: EchoSession, cells: list[str], **fields: Any) -> Any:
        async with service(with_session(session)) as running:
            got = await request(f"{running.url}/run_jupyter", "POST", {"cells": cells, **fields})
        assert got.status == 200
        return got.json

    async def test_cells_run_in_order_in_one_session_that_is_closed(self) -> None:
        session = EchoSession()
        body = await self.run(session, ["a", "b"], files={"in": "MQ==", "skip": None}, fetch_files=["in", "missing"])
        assert [cell["stdout"] for cell in body["cells"]] == ["a", "b"]
        assert (body["status"], body["driver"]["status"], body["driver"]["return_code"]) == ("Success", "Finished", 0)
        assert body["files"] == {"in": "MQ=="}
        assert session.closed.is_set()

    async def test_each_cell_has_its_limit_and_all_share_the_total(self) -> None:
        session = EchoSession()
        body = await self.run(session, ["sleep", "sleep", "never"], cell_timeout=1.0, total_timeout=1.5)
        assert session.asked[0] == 1.0
        assert session.asked[1] is not None
        assert session.asked[1] <= 0.5
        assert len(body["cells"]) == 2
        assert (body["status"], body["driver"]["status"]) == ("Failed", "TimeLimitExceeded")

    async def test_without_a_cell_limit_only_the_total_counts(self) -> None:
        session = EchoSession()
        await self.run(session, ["a"], total_timeout=5)
        assert session.asked[0] == pytest.approx(5, abs=0.5)

    async def test_cells_after_the_interpreters_death_do_not_run(self) -> None:
        body = await self.run(EchoSession(), ["a", "lose", "b"], fetch_files=["x"])
        assert len(body["cells"]) == 2
        assert (body["status"], body["driver"]["return_code"], body["files"]) == ("Failed", -9, {})

    async def test_another_kernel_is_sandbox_error(self) -> None:
        body = await self.run(EchoSession(), ["a"], kernel="ir")
        assert (body["status"], body["cells"], body["driver"]) == ("SandboxError", [], None)
        assert "ir" in body["message"]

    @pytest.mark.parametrize("kernel", ["python3", "python"])
    async def test_pythons_two_names_are_accepted(self, kernel: str) -> None:
        assert (await self.run(EchoSession(), ["a"], kernel=kernel))["status"] == "Success"

    async def test_no_room_for_a_session_is_504(self) -> None:
        async with service(with_session(EchoSession(), delay=60), max_wait_seconds=0.1) as running:
            got = await request(f"{running.url}/run_jupyter", "POST", {"cells": []})
        assert got.status == 504


class TestSessions:
    async def test_a_session_keeps_its_files_between_requests_and_is_closed_by_delete(self) -> None:
        session = EchoSession()
        async with service(with_session(session)) as running:
            opened = await request(f"{running.url}/v1/sessions", "POST")
            assert opened.status == 201
            url = f"{running.url}/v1/sessions/{opened.json['session_id']}"
            cell = await request(f"{url}/cells", "POST", {"code": "hello", "seconds": 3})
            assert (cell.json["stdout"], session.asked) == ("hello", [3])
            assert (await request(f"{url}/files", "PUT", {"files": {"a b": "MQ=="}})).status == 204
            assert (await request(f"{url}/files?name=a%20b&name=c")).json == {"files": {"a b": "MQ=="}}
            assert (await request(url, "DELETE")).status == 204
            assert session.closed.is_set()
            gone = await request(f"{url}/cells", "POST", {"code": "hello"})
            assert (gone.status, gone.json["error"]) == (404, "SessionLostError")

    async def test_an_idle_session_is_closed(self) -> None:
        session = EchoSession()
        async with service(with_session(session), session_idle_seconds=0.1) as running:
            await request(f"{running.url}/v1/sessions", "POST", {"idle_seconds": 1000})
            async with asyncio.timeout(30):
                await session.closed.wait()

    async def test_a_running_cell_is_not_idle(self) -> None:
        session = EchoSession()
        async with service(with_session(session), session_idle_seconds=1) as running:
            opened = await request(f"{running.url}/v1/sessions", "POST")
            url = f"{running.url}/v1/sessions/{opened.json['session_id']}/cells"
            assert (await request(url, "POST", {"code": "sleep", "seconds": 1.5})).json["verdict"] == "timed_out"
            assert not session.closed.is_set()

    async def test_a_lost_session_is_gone_at_once(self) -> None:
        session = EchoSession()
        async with service(with_session(session)) as running:
            opened = await request(f"{running.url}/v1/sessions", "POST")
            url = f"{running.url}/v1/sessions/{opened.json['session_id']}/cells"
            assert (await request(url, "POST", {"code": "lose"})).json["session_lost"]
            assert session.closed.is_set()
            assert (await request(url, "POST", {"code": "hello"})).status == 404

    async def test_more_sessions_than_allowed_are_turned_away(self) -> None:
        async with service(with_session(EchoSession()), max_sessions=1) as running:
            assert (await request(f"{running.url}/v1/sessions", "POST")).status == 201
            assert (await request(f"{running.url}/v1/sessions", "POST")).status == 429

    async def test_a_client_that_hangs_up_while_opening_leaves_no_session_behind(self) -> None:
        session = EchoSession()
        async with service(with_session(session, delay=0.3), max_sessions=1) as running:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await request(f"{running.url}/v1/sessions", "POST")
            await asyncio.sleep(0.1)
            assert (await request(f"{running.url}/v1/sessions", "POST")).status == 201

    async def test_leaving_the_service_closes_its_sessions(self) -> None:
        session = EchoSession()
        async with service(with_session(session)) as running:
            await request(f"{running.url}/v1/sessions", "POST")
        assert session.closed.is_set()

    async def test_bad_files_are_the_requests_fault(self) -> None:
        async with service(with_session(EchoSession())) as running:
            opened = await request(f"{running.url}/v1/sessions", "POST")
            url = f"{running.url}/v1/sessions/{opened.json['session_id']}/files"
            got = await request(url, "PUT", {"files": {"a": "!"}})
        assert (got.status, got.json["error"]) == (400, "ProgramError")
