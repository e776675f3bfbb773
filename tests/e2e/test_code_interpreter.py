"""The code interpreter, embedded and through our own service: the model's calls and the results it reads."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from interpreting import interpreter, texts, trajectory
from serving import ScriptedSandbox, http, peer, service, service_in_thread

from toolyard.errors import ConfigError
from toolyard.messages import OpenAIFunctionParsedSchema
from toolyard.sandbox.local import LocalSandbox
from toolyard.tools.code_interpreter.tool import CodeInterpreterConfig, SandboxFusionTool
from toolyard.tools.instance import ToolOutcome, open_instance, open_instances

pytestmark = pytest.mark.kernel("confined")

SAMPLE = {
    "code": "total_pay_this_year = 200000\nbonus_percentage = 10 / 100\n"
    "bonus_this_year = total_pay_this_year * bonus_percentage\n"
    "total_income_this_year = total_pay_this_year + bonus_this_year\nprint(total_income_this_year)",
    "executes": "True",
}
"""verl's own."""
JSON_TRACEBACK = """\
Traceback (most recent call last):
  File "/sandbox/main.py", line 3, in <module>
    json.loads('x')
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
"""
SYNTAX_ERROR = """\
  File "/sandbox/main.py", line 1
    print('not closed'
         ^
SyntaxError: '(' was never closed
"""


def without_marks(text: str) -> str:
    """The lines of a traceback that underline its source differ between versions of Python."""
    return re.sub(r"^ +[~^]+\n", "", text, flags=re.MULTILINE)


@pytest.fixture(scope="module", params=["embedded", "service"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "embedded":
        yield ""
    else:
        with service_in_thread(LocalSandbox) as url:
            yield url


# verl's test plan -----------------------------------------------------------------------------------------------------


async def test_tool_call_basic_case(url: str) -> None:
    """A call as a parser finds it in sampled text, and its result."""
    parsed = OpenAIFunctionParsedSchema(name="code_interpreter", arguments=json.dumps(SAMPLE))
    async with interpreter(url) as tool, open_instances({tool.name: tool}, "r1") as instances:
        result = await instances.call(parsed.name, parsed.arguments)
    assert (result.outcome, result.response.text, result.reward) == (ToolOutcome.OK, "220000.0\n", None)
    assert result.metrics.items() >= {"verdict": "ok", "exit_code": 0}.items()


async def test_tool_call_batch_case(url: str) -> None:
    """Many trajectories at once, several calls of each at once: every answer is that of its own call."""
    async with interpreter(url) as tool:

        async def one(number: int) -> list[str | None]:
            async with open_instance(tool, f"r{number}") as instance, asyncio.TaskGroup() as group:
                calls = [
                    group.create_task(instance.call({"code": f"print({number} * 100 + {call})"})) for call in range(3)
                ]
            return [call.result().response.text for call in calls]

        async with asyncio.TaskGroup() as group:
            batch = [group.create_task(one(number)) for number in range(24)]
    assert [task.result() for task in batch] == [
        [f"{number * 100 + call}\n" for call in range(3)] for number in range(24)
    ]


async def test_rotten_execution(url: str) -> None:
    """The limiter recovers from whatever fails under its permits."""
    rotten = ["1/0", "import os; os.abort()", {"code": "1", "language": "no such"}, {"code": "1", "timeout": "soon"}]
    async with interpreter(url, rate_limit=1, num_workers=1) as tool:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(trajectory(tool, *rotten, request_id=f"r{number}"))
        assert await texts(tool, "print('recovered')") == ["recovered\n"]
        assert tool._places.limiter is not None
        statistics = await tool._places.limiter.statistics()
        assert (statistics.in_flight, statistics.waiting) == (0, 0)


# What the model reads -------------------------------------------------------------------------------------------------


WHAT_IS_READ = [
    ("print(6 * 7)", "42\n", "ok"),
    ("print('no newline', end='')", "no newline", "ok"),
    ("x = 6 * 7\nx", "[no output: print what you want to see]", "ok"),
    ("import sys\nprint('out')\nprint('err', file=sys.stderr)", "out\nerr\n", "ok"),
    (
        "print('before')\nimport json\njson.loads('x')",
        f"before\n{JSON_TRACEBACK}",
        "failed",
    ),
    (
        "print('not closed'",
        SYNTAX_ERROR,
        "failed",
    ),
    ("import sys; sys.exit('giving up')", "giving up\n", "failed"),
    ("import sys; sys.exit(3)", "[exited with code 3]", "failed"),
    ("import os; print('bye', flush=True); os.abort()", "bye\n[crashed: SIGABRT]", "signaled"),
    ("import time; print('so far', flush=True); time.sleep(60)", "so far\n[stopped after 2 s]", "timed_out"),
    ("while True: pass", "[stopped after 2 s]", "timed_out"),
    ("x = bytearray(1 << 30)", "[killed: more than 256 MB of memory]", "memory_exceeded"),
    ("input()", "EOFError: EOF when reading a line\n", "failed"),
]
"""Code, what the model reads of it, and the verdict."""


async def test_the_model_reads_what_a_person_in_a_notebook_would_see(url: str) -> None:
    async with interpreter(url, default_timeout=2, memory_limit_mb=256) as tool, asyncio.TaskGroup() as group:
        running = [
            group.create_task(trajectory(tool, code, request_id=f"r{number}"))
            for number, (code, _, _) in enumerate(WHAT_IS_READ)
        ]
    for task, (_, text, verdict) in zip(running, WHAT_IS_READ, strict=True):
        [result] = task.result()
        shown, text = without_marks(result.response.text or ""), without_marks(text)
        assert shown.endswith(text) if text.startswith("EOFError") else shown == text
        assert (result.outcome, result.metrics["verdict"]) == (ToolOutcome.OK, verdict)


async def test_floods_are_cut_and_stopped(url: str) -> None:
    async with interpreter(url, max_output_chars=100) as tool:
        cut, flood = await texts(tool, "print('a' * 200 + 'b' * 200)", "while True: print('x' * 100_000)")
    assert cut == f"{'a' * 37}\n[… 327 characters cut …]\n{'b' * 36}\n"
    assert flood is not None
    assert flood.endswith("[… what was printed after 1 MB was dropped …]\n[stopped: more than 64 MB of output]")
    assert len(flood) < 200


async def test_half_an_emoji_in_the_code_is_an_escape_in_the_program(url: str) -> None:
    async with interpreter(url) as tool:
        assert await texts(tool, "print(ascii('\ud83d'))", "print('🙂')") == ["'\\ud83d'\n", "🙂\n"]


# Language and time ----------------------------------------------------------------------------------------------------


async def test_the_model_may_name_a_language(url: str) -> None:
    async with interpreter(url) as tool:
        assert await texts(
            tool,
            {"code": "echo hello; ls /nope; exit 3", "language": "bash"},
            {"code": "print(1)", "language": "Python3"},
            {"code": "print(1)", "language": ""},
        ) == ["hello\nls: cannot access '/nope': No such file or directory\n[exited with code 3]", "1\n", "1\n"]


@pytest.mark.toolchain("cpp")
async def test_a_compiled_language_is_compiled_first(url: str) -> None:
    async with interpreter(url, default_language="c++") as tool:
        good, bad = await texts(tool, '#include <cstdio>\nint main() { puts("42"); }', "int main() { return x; }")
    assert good == "42\n"
    assert bad is not None
    assert "error: ‘x’ was not declared in this scope" in bad
    assert bad.endswith("\n[compilation failed]")


async def test_the_model_may_name_a_time_also_as_text(url: str) -> None:
    async with interpreter(url) as tool, asyncio.TaskGroup() as group:
        running = [
            group.create_task(texts(tool, {"code": "import time; time.sleep(60)", "timeout": timeout}, request_id=name))
            for name, timeout in {"number": 0.5, "text": "0.5", "untidy": " .5 "}.items()
        ]
    assert [task.result() for task in running] == [["[stopped after 0.5 s]"]] * 3


async def test_a_time_left_empty_is_the_default_and_one_too_long_is_shortened() -> None:
    sandbox = ScriptedSandbox()
    async with service(sandbox) as running, interpreter(running.url, default_timeout=7) as tool:
        await trajectory(tool, *({"code": "1", "timeout": asked} for asked in (None, "", 7.5, "inf", 1e9, 10**400)))
    assert [limits.run_seconds for _, limits in sandbox.programs] == [7, 7, 7.5, 300, 300, 300]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"timeout": "soon"}, "timeout: 'soon' is not a number of seconds above 0 and at most 300"),
        ({"timeout": -1}, "timeout: '-1' is not a number of seconds above 0 and at most 300"),
        ({"timeout": "nan"}, "timeout: 'nan' is not a number of seconds above 0 and at most 300"),
        ({"timeout": True}, "timeout: 'True' is not a number of seconds above 0 and at most 300"),
        ({"timeout": {"s": 1}}, "timeout: \"{'s': 1}\" is not a number of seconds above 0 and at most 300"),
        (
            {"language": "pyhton"},
            "unknown language 'pyhton'; did you mean 'python' or 'python_gpu'? (expected one of: ",
        ),
        ({"language": "cobol"}, "unknown language 'cobol' (expected one of: python, "),
    ],
)
async def test_what_cannot_be_run_as_asked_is_the_models_to_correct(url: str, arguments: Any, why: str) -> None:
    async with interpreter(url) as tool:
        [result] = await trajectory(tool, {"code": "print(1)", **arguments})
    assert result.outcome is ToolOutcome.BAD_ARGUMENTS
    assert (result.response.text or "").startswith(f"Error: code_interpreter was not called: {why}")


WITHOUT_TOOLCHAINS = """
import asyncio, sys
from toolyard.tools.code_interpreter import SandboxFusionTool
from toolyard.tools.instance import open_instance

async def main():
    for config, arguments in (({}, {"language": "lua"}), ({"default_language": "lua"}, {})):
        tool = SandboxFusionTool(config)
        async with open_instance(tool, "r1") as instance:
            result = await instance.call({"code": "print(1)", **arguments})
        await tool.close()
        print(result.outcome, result.response.text, "apt-get" in result.error)

asyncio.run(main())
"""


def test_a_missing_toolchain_is_told_where_the_model_chose_it_and_ours_where_we_did() -> None:
    command = [sys.executable, "-c", WITHOUT_TOOLCHAINS]
    done = subprocess.run(command, env={"PATH": "/nonexistent"}, capture_output=True, timeout=60, check=True)
    assert done.stdout.decode().splitlines() == [
        "bad_arguments Error: code_interpreter was not called: language 'lua' is not installed here False",
        "failed Error: code_interpreter is not available at the moment True",
    ]
    assert b"apt-get install lua5.4" in done.stderr, "who can do something about it is told how"


async def test_a_service_of_others_is_asked_in_its_own_words() -> None:
    stage = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "42\n", "stderr": ""}
    answer = {"status": "Success", "message": "", "compile_result": None, "run_result": stage, "files": {}}
    async with peer(http(200, answer)) as server, interpreter(f"{server.url}/run_code") as tool:
        assert await texts(tool, {"code": "print(42)", "language": "py", "timeout": 5}) == ["42\n"]
    asked = json.loads(server.requests[0])
    assert (asked["language"], asked["run_timeout"], asked["memory_limit_MB"]) == ("python", 5, -1)


# Configuration --------------------------------------------------------------------------------------------------------


def test_the_seeds_keys_have_the_seeds_defaults() -> None:
    settings = SandboxFusionTool({}).settings
    assert {name: getattr(settings, name) for name in list(CodeInterpreterConfig.model_fields)[:6]} == {
        "num_workers": 10,
        "rate_limit": 10,
        "default_timeout": 30.0,
        "default_language": "python",
        "enable_global_rate_limit": True,
        "sandbox_fusion_url": "",
    }
    assert (settings.memory_limit_mb, settings.stateful, settings.display_last) == (1024, False, False)


def test_a_url_left_empty_in_yaml_means_the_embedded_sandbox() -> None:
    assert SandboxFusionTool({"sandbox_fusion_url": None}).settings.sandbox_fusion_url == ""


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_worker": 3}, r"config: unknown key 'num_worker'; expected one of num_workers, rate_limit, "),
        ({"num_workers": 0}, r"config\.num_workers: Input should be greater than 0; given: 0"),
        ({"default_timeout": "long"}, r"config\.default_timeout: .*; given: 'long'"),
        ({"default_timeout": float("inf")}, r"config\.default_timeout: .*; given: inf"),
        ({"memory_limit_mb": 1 << 60}, r"config\.memory_limit_mb: "),
        ({"default_language": "pyhton"}, r"config\.default_language: unknown language 'pyhton'; did you mean 'python'"),
        ({"sandbox_fusion_url": "localhost:8080"}, r"config\.sandbox_fusion_url: sandbox URL 'localhost:8080': expect"),
    ],
)
def test_a_wrong_config_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SandboxFusionTool(config)


def test_the_model_is_shown_the_seeds_schema() -> None:
    assert SandboxFusionTool({}).tool_schema.model_dump() == {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "A tool for executing code.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to execute.", "enum": None}},
                "required": ["code"],
            },
            "strict": False,
        },
    }
