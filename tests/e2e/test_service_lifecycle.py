"""How the service starts and stops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

import pytest
from serving import ScriptedSandbox, post_code, request, server_process, service, until_busy, until_refused

from toolyard.errors import ConfigError
from toolyard.sandbox.service.server import ServiceConfig, listen


class TestShutdown:
    async def test_a_running_program_may_finish_within_the_grace_period(self) -> None:
        async with server_process(takes=0.5, grace=10) as (process, url), asyncio.TaskGroup() as group:
            running = group.create_task(request(f"{url}/run_code", "POST", {"code": "", "language": "python"}))
            await until_busy(url)
            process.terminate()
            assert (await running).json["status"] == "Success"
            assert process.stdout is not None
            assert (await process.stdout.read()).endswith(b"bye\n")
            assert await process.wait() == 0

    async def test_one_that_takes_longer_is_cancelled_with_an_answer(self) -> None:
        async with server_process(takes=60, grace=0.2) as (process, url), asyncio.TaskGroup() as group:
            running = group.create_task(request(f"{url}/run_code", "POST", {"code": "", "language": "python"}))
            await until_busy(url)
            process.send_signal(signal.SIGINT)
            got = await running
            assert (got.status, got.json["detail"]) == (503, "the service is stopping")
            assert await process.wait() == 0

    async def test_a_second_signal_does_not_wait_for_the_grace_period(self) -> None:
        async with server_process(takes=60, grace=60) as (process, url), asyncio.TaskGroup() as group:
            running = group.create_task(request(f"{url}/run_code", "POST", {"code": "", "language": "python"}))
            await until_busy(url)
            process.send_signal(signal.SIGINT)
            await until_refused(url)
            async with asyncio.timeout(30):
                process.send_signal(signal.SIGINT)
                assert (await running).status == 503
                assert await process.wait() == 0

    async def test_a_stopping_server_accepts_nobody_new(self) -> None:
        async with server_process(takes=60, grace=60) as (process, url), asyncio.TaskGroup() as group:
            running = group.create_task(request(f"{url}/run_code", "POST", {"code": "", "language": "python"}))
            await until_busy(url)
            process.terminate()
            await until_refused(url)
            assert not running.done()
            process.terminate()


class TestEmbedding:
    async def test_the_callers_own_error_comes_out_of_the_block_as_it_is(self) -> None:
        with pytest.raises(ZeroDivisionError):
            async with service(ScriptedSandbox()):
                raise ZeroDivisionError

    async def test_two_services_in_one_process_do_not_mix(self) -> None:
        async with service(ScriptedSandbox()) as one, service(ScriptedSandbox()) as other:
            await post_code(one)
            assert b'verdict="ok"} 1.0' in (await request(f"{one.url}/metrics")).body
            assert b'verdict="ok"' not in (await request(f"{other.url}/metrics")).body


class TestBinding:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::"])
    def test_beyond_loopback_without_a_token_is_refused(self, host: str) -> None:
        with pytest.raises(ConfigError, match="token"):
            listen(ServiceConfig(host=host, port=0))

    @pytest.mark.parametrize("options", [{"token": "t"}, {"allow_remote": True}])
    def test_beyond_loopback_with_a_token_or_on_explicit_wish_is_granted(self, options: dict[str, Any]) -> None:
        listen(ServiceConfig(host="0.0.0.0", port=0, **options)).close()

    def test_a_port_in_use_is_named(self) -> None:
        with listen(ServiceConfig(port=0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use"):
                listen(ServiceConfig(port=port))

    def test_a_host_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(ConfigError, match="no-such-host"):
            listen(ServiceConfig(host="no-such-host.invalid"))

    @pytest.mark.skipif(not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
    async def test_ipv6_loopback_needs_no_token(self) -> None:
        async with service(ScriptedSandbox(), host="::1") as running:
            assert running.url.startswith("http://[::1]:")
            assert (await request(f"{running.url}/v1/ping")).json == "pong"
