"""`toolyard tools` and the example of a custom tool, as a user runs them: real processes, exit codes, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TOOLYARD = str(Path(sys.executable).parent / "toolyard")
EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_tool"
SECONDS = 90

MODULE = """
    import sys, time
    from toolyard.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, tool

    class Diary(BaseTool):
        '''Tells of its life on stderr.'''

        def get_openai_tool_schema(self):
            function = {"name": "diary", "description": "Keeps a diary.\\nAll of it."}
            return OpenAIFunctionToolSchema.model_validate({"function": function})

        async def create(self, instance_id=None, **kwargs):
            print("create", kwargs, file=sys.stderr)
            return instance_id, ToolResponse(text="Dear diary,")

        async def execute(self, instance_id, parameters, **kwargs):
            return "nothing happened", 0.5, {"pages": 1}

        async def calc_reward(self, instance_id, **kwargs):
            raise RuntimeError("no ink")

        async def release(self, instance_id, **kwargs):
            print("release", file=sys.stderr)

        async def close(self):
            print("close", file=sys.stderr)

    @tool
    def divide(a: int, b: int = 1) -> float:
        '''Divide two numbers.'''
        return a / b

    @tool
    def half_an_emoji() -> str:
        return chr(0xD83D)

    @tool
    def hang() -> None:
        print("hanging", file=sys.stderr, flush=True)
        time.sleep(600)
"""


def toolyard(*args: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TOOLYARD, "tools", *args], input=stdin, capture_output=True, text=True, timeout=SECONDS, cwd=cwd
    )


@pytest.fixture
def tools(tmp_path: Path) -> Callable[..., str]:
    """Writes a YAML file with these tools of the module above, in the same folder."""

    def write(*names: str) -> str:
        (tmp_path / "tools_beside.py").write_text(textwrap.dedent(MODULE))
        path = tmp_path / "tools.yaml"
        path.write_text(json.dumps({"tools": [{"class_name": f"tools_beside.{name}"} for name in names]}))
        return str(path)

    return write


class TestHelp:
    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["--help"], "call them as it would"),
            (["list", "--help"], "toolyard tools list --tools"),
            (["schema", "--help"], "toolyard tools schema code_interpreter"),
            (["call", "-h"], 'toolyard tools call code_interpreter \'{"code": "print(6 * 7)"}\''),
        ],
    )
    def test_teaches_with_examples(self, args: list[str], words: str) -> None:
        done = toolyard(*args)
        assert done.returncode == 0
        assert words in done.stdout

    @pytest.mark.parametrize(
        "args", [["call"], ["nonsense"], ["call", "x", "{}", "--repeat", "0"], ["call", "x", "--create-kwargs", "[1]"]]
    )
    def test_wrong_usage_exits_with_2(self, args: list[str]) -> None:
        done = toolyard(*args)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


class TestList:
    def test_works_out_of_the_box(self) -> None:
        done = toolyard("list")
        assert done.returncode == 0
        assert re.search(r"code_interpreter +native +toolyard\.tools\.code_interpreter.* code +A tool", done.stdout)
        assert re.search(r"calc_gsm8k_reward +native +toolyard\.tools\.gsm8k\.Gsm8kTool +answer", done.stdout)

    @pytest.mark.slow
    def test_shows_optional_parameters_and_the_first_line_of_a_description(self, tools) -> None:
        done = toolyard("list", "--tools", tools("Diary", "divide"))
        assert re.search(r"diary +native +tools_beside\.Diary +Keeps a diary\. *\n", done.stdout)
        assert re.search(r"divide +native +tools_beside\.divide +a, b\? +Divide two numbers\.", done.stdout)
        assert done.stderr == "close\n"

    def test_json(self, tools) -> None:
        found = json.loads(toolyard("list", "--json", "--tools", tools("divide")).stdout)
        assert found == [
            {
                "name": "divide",
                "type": "native",
                "class": "tools_beside.divide",
                "parameters": ["a", "b"],
                "required": ["a"],
                "description": "Divide two numbers.",
            }
        ]


class TestSchema:
    def test_of_all(self) -> None:
        found = json.loads(toolyard("schema").stdout)
        assert [one["function"]["name"] for one in found] == ["code_interpreter", "calc_gsm8k_reward"]

    def test_of_one(self, tools) -> None:
        found = json.loads(toolyard("schema", "divide", "--tools", tools("Diary", "divide")).stdout)
        assert found["type"] == "function"
        assert found["function"]["parameters"]["properties"]["b"] == {"type": "integer", "default": 1}

    @pytest.mark.slow
    def test_of_one_that_is_not_there(self) -> None:
        done = toolyard("schema", "search")
        assert done.returncode == 1
        assert done.stderr == ("toolyard: unknown tool 'search'; known tools: code_interpreter, calc_gsm8k_reward\n")


class TestCall:
    def test_runs_code(self) -> None:
        done = toolyard("call", "code_interpreter", '{"code": "print(6 * 7)"}')
        assert (done.returncode, done.stdout) == (0, "42\n")
        assert done.stderr.startswith("[ok · ")
        assert "verdict ok" in done.stderr
        assert done.stderr.endswith("[calc_reward 0.0]\n")

    @pytest.mark.slow
    def test_repeats_in_one_trajectory(self) -> None:
        done = toolyard(
            "call",
            "calc_gsm8k_reward",
            '{"answer": "18"}',
            "--create-kwargs",
            '{"ground_truth": "18"}',
            "--repeat",
            "2",
        )
        assert done.returncode == 0
        assert done.stdout == "Current parsed answer='18' reward=1.0\n" * 2
        first, second, reward = done.stderr.splitlines()
        assert "step reward 0 ·" in first
        assert "step reward -0.05 ·" in second
        assert reward == "[calc_reward 1.0]"

    @pytest.mark.slow
    def test_json_tells_everything(self) -> None:
        done = toolyard("call", "code_interpreter", "-", "--json", stdin='{"code": "1 / 0"}')
        found = json.loads(done.stdout)
        (call,) = found["calls"]
        assert done.returncode == 0
        assert found["tool"] == "code_interpreter"
        assert found["reward"] == 0.0
        assert found["problems"] == []
        assert call["outcome"] == "ok"
        assert "ZeroDivisionError" in call["response"]["text"]
        assert call["metrics"]["verdict"] == "failed"
        assert call["reward"] is None

    def test_wrong_arguments_are_told_as_the_model_reads_them(self) -> None:
        done = toolyard("call", "code_interpreter", '{"cod": 1}')
        assert done.returncode == 1
        assert done.stdout.startswith('Error: code_interpreter was not called: "code" is a required property')
        assert done.stderr.startswith("[bad_arguments · ")

    def test_a_tool_that_raises_shows_its_traceback_to_you_and_a_line_to_the_model(self, tools) -> None:
        done = toolyard("call", "divide", '{"a": 1, "b": 0}', "--tools", tools("divide"))
        assert done.returncode == 1
        assert done.stdout == "Error: divide failed: ZeroDivisionError: division by zero\n"
        assert "Traceback" in done.stderr
        assert "return a / b" in done.stderr
        assert "[raised · " in done.stderr

    @pytest.mark.slow
    def test_a_failure_of_ours_is_one_line_without_a_traceback(self, tmp_path: Path) -> None:
        url = "http://127.0.0.1:1/run_code"
        name, config = "toolyard.tools.code_interpreter.SandboxFusionTool", {"sandbox_fusion_url": url}
        (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [{"class_name": name, "config": config}]}))
        arguments = ("call", "code_interpreter", '{"code": "print(1)"}', "--tools", str(tmp_path / "tools.yaml"))
        done = toolyard(*arguments)
        assert (done.returncode, done.stdout) == (1, "Error: code_interpreter is not available at the moment\n")
        why, ending, _ = done.stderr.splitlines()
        assert why.startswith(f"SandboxError: {url}: cannot connect")
        assert ending.startswith("[failed · ")
        assert "Traceback" in json.loads(toolyard(*arguments, "--json").stdout)["calls"][0]["error"]

    def test_the_whole_life_of_a_tool(self, tools) -> None:
        done = toolyard("call", "diary", "--create-kwargs", '{"year": 1984}', "--tools", tools("Diary"))
        assert done.returncode == 1  # its reward failed, which would fail a rollout
        assert done.stdout == "Dear diary,\nnothing happened\n"
        assert "create {'year': 1984}" in done.stderr
        assert "step reward 0.5 · pages 1]" in done.stderr
        assert "RuntimeError: no ink" in done.stderr
        assert "[calc_reward none]" in done.stderr
        assert done.stderr.index("release") < done.stderr.index("close")

    @pytest.mark.slow
    def test_an_answer_that_is_no_text_is_still_printed(self, tools) -> None:
        done = toolyard("call", "half_an_emoji", "--tools", tools("half_an_emoji"))
        assert (done.returncode, done.stdout) == (0, "\\ud83d\n")

    @pytest.mark.slow
    def test_a_tool_that_needs_create_kwargs_says_so(self) -> None:
        done = toolyard("call", "calc_gsm8k_reward", '{"answer": "18"}')
        assert done.returncode == 1
        assert done.stderr.startswith("toolyard: tool 'calc_gsm8k_reward': create failed: ")
        assert "ground_truth" in done.stderr
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.slow
    def test_a_tool_that_is_not_there(self, tools) -> None:
        done = toolyard("call", "search", "--tools", tools("Diary"))
        assert done.returncode == 1
        assert done.stderr == "close\ntoolyard: unknown tool 'search'; known tools: diary\n"


class TestInterrupt:
    @staticmethod
    def interrupted(*args: str, once: str) -> tuple[int, str, float]:
        """Ctrl-C once that line was on stderr; the exit status, the rest of stderr, and the seconds it took."""
        process = subprocess.Popen(
            [TOOLYARD, "tools", "call", *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == once
            time.sleep(0.3)
            start = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, rest = process.communicate(timeout=SECONDS)
            return process.returncode, rest, time.monotonic() - start
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate(timeout=SECONDS)

    @pytest.mark.slow
    def test_ends_even_a_function_that_hangs(self, tools) -> None:
        status, rest, seconds = self.interrupted("hang", "--tools", tools("Diary", "hang"), once="hanging\n")
        assert (status, rest) == (130, "close\ninterrupted\n")
        assert seconds < 30

    def test_leaves_no_sandbox_behind(self) -> None:
        process = subprocess.Popen(
            [TOOLYARD, "tools", "call", "code_interpreter", '{"code": "while True: pass"}'], stderr=subprocess.PIPE
        )
        try:
            deadline = time.monotonic() + SECONDS
            while not guests_of(process.pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 130
            assert not guests_of(process.pid)
        finally:
            process.kill()
            process.communicate(timeout=SECONDS)


def guests_of(pid: int) -> list[str]:
    """Sandbox processes of that host: their command lines hold its pid."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(pid).encode() in line and any(part.endswith(b"guest_main.py") for part in line):
                found.append(entry.name)
    return found


class TestErrors:
    @pytest.mark.slow
    def test_of_a_file_are_one_line_with_file_and_entry(self, tmp_path: Path) -> None:
        path = tmp_path / "tools.yaml"
        path.write_text("tools: [{class_name: nowhere.Tool}]")
        done = toolyard("list", "--tools", str(path))
        assert done.returncode == 1
        assert done.stderr.startswith(f"toolyard: {path}: tools[0]: class_name 'nowhere.Tool': no module named")
        assert len(done.stderr.splitlines()) == 1

    @pytest.mark.slow
    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        done = toolyard("list", "--tools", "none.yaml", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (
            1,
            "toolyard: none.yaml: cannot be read: No such file or directory\n",
        )

    @pytest.mark.slow
    def test_modules_are_found_in_the_current_folder_too(self, tools, tmp_path: Path) -> None:
        path = Path(tools("divide"))
        elsewhere = tmp_path / "config" / "tools.yaml"
        elsewhere.parent.mkdir()
        path.rename(elsewhere)
        assert "tools_beside.divide" in toolyard("list", "--tools", "config/tools.yaml", cwd=tmp_path).stdout

    @pytest.mark.slow
    def test_a_file_beside_it_hides_no_module_of_python(self, tools, tmp_path: Path) -> None:
        path = tools("divide")
        (tmp_path / "json.py").write_text("raise RuntimeError('hidden')")
        assert toolyard("list", "--tools", path, cwd=tmp_path).returncode == 0


class TestExample:
    def test_runs_and_prints_what_its_readme_shows(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, str(EXAMPLE / "run.py")],
            capture_output=True, text=True, timeout=SECONDS, cwd=tmp_path, env={**os.environ, "PYTHONUTF8": "1"},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert "rewards: {'my_custom_function': 1.0, 'count_letters': 0.0}" in done.stdout
        assert done.stdout in (EXAMPLE / "README.md").read_text(encoding="utf-8")

    @pytest.mark.slow
    def test_its_tools_can_be_called_by_hand(self) -> None:
        done = toolyard(
            "call", "my_custom_function", '{"param1": "crate"}', "--create-kwargs", '{"word": "crane"}',
            "--tools", str(EXAMPLE / "tools.yaml"),
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "4 of 5 letters are in their places.\n")
        assert done.stderr.endswith("[calc_reward 0.8]\n")
