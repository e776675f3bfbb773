"""Engines over HTTP against everything a server and a network can do to them, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest
from engine_asking import KINDS, PROMPT, SHORT, answered, ask, until

from patience import patient
from toolyard.engines.http.sglang import SglangEngine
from toolyard.engines.http.vllm import VllmEngine
from toolyard.engines.protocol import ChatEngine, Engine, Finish, Sampling
from toolyard.errors import ConfigError, EngineError, EngineRequestError
from toolyard.testing.engine.byte_model import BYTE_EOS, ByteModel
from toolyard.testing.engine.servers import SGLANG, VLLM, EngineServer, Fault

# Failures ---------------------------------------------------------------------------------------------------------


FAULTS = {
    "it hangs up in mid-answer": Fault(hang_up_after=20),
    "it hangs up before it": Fault(hang_up_after=0),
    "not JSON": Fault(body=b"<html>Bad Gateway</html>"),
    "half of JSON": Fault(body=b'{"choices": [{"mess'),
    "JSON, but no object": Fault(body=b"[1, 2]"),
    "an object, but no answer": Fault(body=b"{}"),
    "not UTF-8": Fault(body=b"\xff\xfe\x00"),
    "empty": Fault(body=b""),
    "500": Fault(status=500, body=b"CUDA error"),
    "502": Fault(status=502),
    "503": Fault(status=503, body=b'{"detail": "loading"}'),
    "429": Fault(status=429, headers={"Retry-After": "0"}),
    "408": Fault(status=408),
}


# What happens on the way is shared by all kinds; what an answer must be is not.
CASES = [
    pytest.param(kind, fault, id=f"{kind.__name__}: {name}")
    for kind in KINDS
    for name, fault in FAULTS.items()
    if kind is SglangEngine or name in ("it hangs up in mid-answer", "an object, but no answer", "500")
]


@pytest.mark.parametrize(("kind", "fault"), CASES)
async def test_what_failed_once_is_asked_again(kind: Any, fault: Fault) -> None:
    async with EngineServer() as server, kind(server.url) as engine:
        right = await ask(engine)
        server.faults = [fault]
        assert await ask(engine) == right
        assert (len(answered(server)), engine.retried) == (3, 1)


@pytest.mark.parametrize(("kind", "fault"), CASES)
async def test_what_keeps_failing_is_an_engine_error_that_names_the_server(kind: Any, fault: Fault) -> None:
    async with EngineServer() as server, kind(server.url, retries=1) as engine:
        server.faults = [fault] * 2
        with pytest.raises(EngineError, match=server.url) as failed:
            await ask(engine)
        assert failed.value.retryable
        assert not isinstance(failed.value, EngineRequestError)
        assert len(answered(server)) == 2
        assert await ask(engine), "and the engine is none the worse for it"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 307])
async def test_a_refusal_is_final_and_has_the_servers_words(kind: Any, status: int) -> None:
    words = b'{"error": {"message": "the prompt is ' + b"much " * 1000 + b'too long"}}'
    async with EngineServer() as server, kind(server.url) as engine:
        server.faults = [Fault(status=status, body=words)] * 9
        with pytest.raises(EngineRequestError, match="the prompt is much much") as refused:
            await ask(engine)
        assert not refused.value.retryable
        assert len(str(refused.value)) < 500
        assert len(answered(server)) <= 2  # vLLM's two routes, or chat with and without extras
        assert engine.retried == 0


async def test_a_server_that_says_when_to_come_back_is_obeyed() -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        for status in (429, 503):
            server.faults = [Fault(status=status, headers={"Retry-After": "0.3"})]
            began = time.monotonic()
            await ask(engine)
            assert 0.3 <= time.monotonic() - began < patient(2)


async def test_a_server_that_asks_for_an_hour_is_not_waited_for() -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        server.faults = [Fault(status=429, headers={"Retry-After": "3600"})]
        async with asyncio.timeout(patient(2)):
            with pytest.raises(EngineError, match="429"):
                await ask(engine)


@pytest.mark.parametrize("wish", ["nan", "-5", "inf", "Wed, 21 Oct 2026 07:28:00 GMT", ""])
async def test_a_retry_after_that_makes_no_sense_is_ignored(wish: str) -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        server.faults = [Fault(status=429, headers={"Retry-After": wish})]
        async with asyncio.timeout(patient(3)):
            assert await ask(engine)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_never_answers_is_given_up(kind: Any) -> None:
    async with EngineServer() as server, kind(server.url, request_timeout=0.7) as engine:
        await ask(engine)
        server.faults = [Fault(silent=True)]
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"no answer to 'r-1' within 0\.7 s") as failed:
            await ask(engine)
        assert failed.value.retryable
        assert time.monotonic() - began < patient(3)
        await until(lambda: server.hung_up == 1)


async def test_a_port_that_takes_connections_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        async with asyncio.timeout(5), VllmEngine(url, request_timeout=0.3, abort_timeout=0.2) as engine:
            with pytest.raises(EngineError, match=r"within 0\.3 s"):
                await ask(engine)


async def test_a_port_that_speaks_no_http_is_an_engine_error() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.com ESMTP\r\n" * 100)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with server, SglangEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", retries=1) as engine:
        with pytest.raises(EngineError, match="the connection broke") as failed:
            await ask(engine)
        assert failed.value.retryable


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_at_home_is_an_engine_error_soon(kind: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
    async with asyncio.timeout(5), kind(url, retries=2) as engine:
        with pytest.raises(EngineError, match="cannot connect") as failed:
            await ask(engine)
        assert failed.value.retryable
        assert "tries: 3" in str(failed.value)


async def test_a_slow_answer_is_waited_for_as_long_as_its_time_out_says() -> None:
    async with (
        EngineServer() as server,
        SglangEngine(server.url, request_timeout=30) as patient,
        SglangEngine(server.url, request_timeout=0.5) as hasty,
    ):
        server.faults = [Fault(piece_seconds=0.05)] * 2
        assert (await ask(patient)).finish is Finish.LENGTH
        with pytest.raises(EngineError, match=r"within 0\.5 s"):
            await ask(hasty)


async def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    async with EngineServer() as server, SglangEngine(server.url, retries=0, max_response_bytes=100_000) as engine:
        server.faults = [Fault(body=b"[" * 30_000_000)]
        with pytest.raises(EngineError, match="longer than 100000 bytes"):
            await ask(engine)
        assert await ask(engine)


async def test_json_that_is_nested_without_end_is_an_engine_error() -> None:
    async with EngineServer() as server, SglangEngine(server.url, retries=0) as engine:
        server.faults = [Fault(body=b"[" * 3_000_000)]
        with pytest.raises(EngineError, match="not JSON"):
            await ask(engine)


# Answers that are none ----------------------------------------------------------------------------------------------


def sglang_with(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], Any]:
    def rewrite(answer: dict[str, Any]) -> dict[str, Any]:
        copied = orjson.loads(orjson.dumps(answer))
        change(copied)
        return copied

    return rewrite


BAD_SGLANG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "fewer logprobs": (lambda a: a["meta_info"]["output_token_logprobs"].pop(), "8 tokens, but 7"),
    "other tokens": (lambda a: a["output_ids"].__setitem__(0, 5), "have different tokens"),
    "text for ids": (lambda a: a.update(output_ids=["a"] * 8), "not a list of token ids"),
    "booleans for ids": (lambda a: a.update(output_ids=[True] * 8), "not a list of token ids"),
    "negative ids": (lambda a: a.update(output_ids=[-1] * 8), "not a list of token ids"),
    "null logprob": (lambda a: a["meta_info"]["output_token_logprobs"][2].__setitem__(0, None), "token 2 has"),
    "positive logprob": (lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, 0.7), "0.7"),
    "no logprobs": (lambda a: a["meta_info"].pop("output_token_logprobs"), "not a list of"),
    "logprobs of another shape": (lambda a: a["meta_info"].update(output_token_logprobs=[[], 1]), "not a list of"),
    "no finish": (lambda a: a["meta_info"].pop("finish_reason"), "no meta_info.finish_reason"),
    "another finish": (lambda a: a["meta_info"].update(finish_reason={"type": "bored"}), "'bored'"),
    "no meta_info": (lambda a: a.pop("meta_info"), "no meta_info"),
    "nothing": (
        lambda a: (a.update(output_ids=[]), a["meta_info"].update(output_token_logprobs=[])),
        "no tokens, but",
    ),
}


@pytest.mark.parametrize("bad", BAD_SGLANG.values(), ids=BAD_SGLANG.keys())
async def test_an_answer_that_does_not_add_up_is_not_believed(
    bad: tuple[Callable[[dict[str, Any]], object], str],
) -> None:
    change, complaint = bad
    async with EngineServer() as server, SglangEngine(server.url, retries=0) as engine:
        server.rewrite = sglang_with(change)
        with pytest.raises(EngineError, match=complaint) as failed:
            await ask(engine)
        assert failed.value.retryable


async def test_more_tokens_than_were_asked_for_are_not_believed() -> None:
    async with EngineServer() as server, SglangEngine(server.url, retries=0) as engine:
        server.rewrite = sglang_with(
            lambda a: (a["output_ids"].append(7), a["meta_info"]["output_token_logprobs"].append([-1.0, 7, None]))
        )
        with pytest.raises(EngineError, match="9 tokens, but max_tokens was 8"):
            await ask(engine)


async def test_ids_that_are_not_listed_are_taken_from_the_logprobs() -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        right = await ask(engine)
        server.rewrite = sglang_with(lambda a: a.pop("output_ids"))
        assert await ask(engine) == right


async def test_a_logprob_a_rounding_error_above_zero_is_zero() -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        server.rewrite = sglang_with(lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(0, 1e-7))
        assert (await ask(engine)).logprobs[0] == 0.0


async def test_vllms_mark_for_no_logprob_is_not_taken_for_one() -> None:
    async with EngineServer((VLLM,)) as server, VllmEngine(server.url, retries=0) as engine:
        server.rewrite = sglang_with(lambda a: a["choices"][0]["logprobs"]["token_logprobs"].__setitem__(3, -9999.0))
        with pytest.raises(EngineError, match="token 3 has an invalid log-probability: -9999"):
            await ask(engine)


async def test_a_vllm_without_token_ids_is_told_from_one_with() -> None:
    async with EngineServer((VLLM,)) as server, VllmEngine(server.url, retries=0) as engine:
        server.rewrite = sglang_with(lambda a: a["choices"][0].pop("token_ids"))
        with pytest.raises(EngineError, match=r"since 0\.10\.2"):
            await ask(engine)


async def test_a_stop_token_that_was_left_out_is_put_back_if_its_logprob_is_there() -> None:
    async with EngineServer(model=ByteModel(says="hi")) as server, VllmEngine(server.url) as engine:
        stop = Sampling(max_tokens=8, stop_token_ids=(BYTE_EOS,))
        right = await ask(engine, stop)
        assert (right.token_ids, right.finish) == ([*b"hi", BYTE_EOS], Finish.STOP)
        server.rewrite = sglang_with(lambda a: a["choices"][0]["token_ids"].pop())
        assert await ask(engine, stop) == right


async def test_a_stop_token_that_was_left_out_without_a_trace_is_refused() -> None:
    """Trained on, such answers would teach the model never to stop."""

    def drop(answer: dict[str, Any]) -> None:
        answer["output_ids"].pop()
        answer["meta_info"]["output_token_logprobs"].pop()

    async with EngineServer(model=ByteModel(says="hi")) as server, SglangEngine(server.url) as engine:
        server.rewrite = sglang_with(drop)
        with pytest.raises(EngineError, match=f"the token {BYTE_EOS}, which the server left out") as failed:
            await ask(engine)
        assert not failed.value.retryable


# What is sent ------------------------------------------------------------------------------------------------------


FULL = Sampling(
    max_tokens=5, temperature=0.7, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1,
    seed=-7, stop_token_ids=(5, 6), stop=("X", "Y"),
)  # fmt: skip


async def test_sglang_is_sent_every_wish() -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        await engine.generate(PROMPT, FULL, request_id="r-1")
        (body,) = server.posts("/generate")
        assert body.pop("rid").endswith("-r-1")
        assert body == {
            "input_ids": PROMPT,
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
                "repetition_penalty": 1.1, "sampling_seed": 2**63 - 7, "stop_token_ids": [5, 6], "stop": ["X", "Y"],
                "ignore_eos": False, "no_stop_trim": True, "skip_special_tokens": False,
            },
        }  # fmt: skip


VLLM_WISHES = {
    "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1,
    "seed": 2**63 - 7, "stop_token_ids": [5, 6], "stop": ["X", "Y"], "logprobs": 0, "ignore_eos": False,
    "include_stop_str_in_output": True, "skip_special_tokens": False,
}  # fmt: skip


async def test_vllm_is_sent_every_wish_by_either_route() -> None:
    async with EngineServer() as server, VllmEngine(server.url) as engine:
        await engine.generate(PROMPT, FULL, request_id="r-1")
        (body,) = server.posts("/inference/v1/generate")
        assert body.pop("request_id").endswith("-r-1")
        assert body == {"token_ids": PROMPT, "sampling_params": VLLM_WISHES}
    async with EngineServer((VLLM,)) as server, VllmEngine(f"{server.url}/v1/") as engine:
        await engine.generate(PROMPT, FULL, request_id="r-1")
        await engine.generate(PROMPT, FULL, request_id="r-1")
        body, _ = server.posts("/v1/completions")
        assert body.pop("request_id").endswith("-r-1")
        assert body == {"model": "byte-model", "prompt": PROMPT, "return_token_ids": True, **VLLM_WISHES}


@pytest.mark.parametrize("status", [403, 404, 405, 501])
async def test_a_vllm_without_the_route_for_tokens_is_asked_by_the_other_one_from_then_on(status: int) -> None:
    async with EngineServer() as server, VllmEngine(server.url) as engine:
        server.faults = [Fault(status=status, body=b'{"detail": "Not Found"}')]
        for _ in range(3):
            assert (await ask(engine)).finish is Finish.LENGTH
        assert answered(server) == ["/inference/v1/generate", *["/v1/completions"] * 3]


@pytest.mark.parametrize("request_id", ["a b", "ünïcode", "line\r\nbreak: x", "", "x" * 3000, "\N{SNOWMAN}/../%00"])
async def test_a_request_may_have_any_name(request_id: str) -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        assert (await ask(engine, request_id=request_id)).finish is Finish.LENGTH
        await engine.abort(request_id)


async def test_no_name_of_a_try_begins_another() -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        for request_id in ("", "r", "r-1", "r-1", "r-11"):
            await ask(engine, request_id=request_id)
        names = [body["rid"] for body in server.posts("/generate")]
        assert not [(a, b) for a in names for b in names if a is not b and b.startswith(a)]


async def test_a_prompt_of_a_million_tokens_is_sent() -> None:
    async with EngineServer((SGLANG,), context=2_000_000) as server, SglangEngine(server.url) as engine:
        found = await engine.generate(PROMPT * 62_500, SHORT, request_id="r-1")
        assert len(found.token_ids) == 8


async def test_a_prompt_that_is_not_made_of_integers_is_refused() -> None:
    async with EngineServer() as server, SglangEngine(server.url) as engine:
        for bad in ([1.5], [True, object()], [2**80], ["a"]):
            with pytest.raises(EngineRequestError):
                await engine.generate(bad, SHORT, request_id="r-1")  # type: ignore[arg-type]


async def test_a_thousand_requests_at_once_are_served_by_one_engine() -> None:
    async with EngineServer(token_seconds=0.001) as server, SglangEngine(server.url) as engine:
        sampling = Sampling(max_tokens=33, temperature=0)
        right = await ask(engine, sampling)
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(ask(engine, sampling, request_id=f"r-{n}")) for n in range(1000)]
        assert all(task.result() == right for task in running)


async def test_connections_can_be_bounded() -> None:
    async with EngineServer(token_seconds=0.002) as server, SglangEngine(server.url, max_connections=3) as engine:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(server.running))
                await asyncio.sleep(0.001)

        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(ask(engine, Sampling(max_tokens=40), request_id=f"r-{n}") for n in range(12)))
        watching.cancel()
        assert 1 <= most <= 3


# Secrets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_the_api_key_opens_the_server_and_appears_nowhere_else(kind: Any) -> None:
    secret = "sk-very-secret"
    async with EngineServer(api_key=secret) as server:
        async with kind(server.url, api_key=secret) as engine:
            assert await ask(engine)
            assert secret not in repr(engine)
        async with kind(server.url, api_key="sk-wrong") as engine:
            with pytest.raises(EngineRequestError, match=r"401.*\*\*\*") as refused:
                await ask(engine)
            assert "sk-wrong" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["", "host:8000", "ftp://host", "http://", "http://user:secret@host", "http://host?key=secret", "http://h:x"]
)
def test_a_url_that_is_none_is_a_config_error_that_keeps_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SglangEngine(url)
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigError):
        VllmEngine([])


async def test_every_kind_is_an_engine_or_a_chat_engine() -> None:
    made: list[Awaitable[Any] | Any] = [kind("http://127.0.0.1:9") for kind in KINDS]
    assert [isinstance(engine, Engine) for engine in made] == [True, True, False]
    assert [isinstance(engine, ChatEngine) for engine in made] == [False, False, True]
