"""verl's scorer for a SandboxFusion service, with its names: callers only change the import line.

    score, metadata = compute_score(url, semaphore, 1024, completion, test_cases, continuous=True)
    results, metadata = check_correctness(url, {"inputs": […], "outputs": […]}, program)

A result is True or False (the output is right or wrong), -1 (the service failed), -2 (the program crashed), -3 (it
timed out) or -4 (it does not compile); its metadata always has the same fifteen keys. An empty URL means the embedded
sandbox. For new code, `rewards.code` is better: one compilation, cheap cases, real verdicts.

Intended differences from verl:

* `compute_score` raises `RewardError` if a case that counts is -1, and `GroundTruthError` for unreadable test cases.
  verl scores both 0, and trains on them as if the model had been wrong. `check_correctness` still returns -1.
* Busy responses (429, 503, 504) and broken connections are retried, not only 504; `Retry-After` is respected.
* With `fn_name`, a function that raises or is missing is -2, not a wrong answer; and the program's script part
  (`if __name__ == "__main__"`) is not run.
* After a compile error, remaining cases of the same program are not sent.
* An output that is a correct prefix is -1 if the service may have truncated it: from a megabyte on, and
  from 64 KB on if it ends within a line.
* With `fn_name`, a function that the answer does not define is -2, even if a module that verl imports has that name.

docs/guides/verl-rewards.md lists all of them, with examples.

As in verl, an `assert_case` is only appended to the program: a program that exits before it with code 0 is True. To
train on assertions, use `rewards.code`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

from toolyard.errors import OURS, RewardError, SandboxError, ToolyardError
from toolyard.rewards.code.verdicts import may_be_truncated
from toolyard.rewards.protocol import GroundTruthError
from toolyard.rewards.sandbox_fusion.call import post, run_here
from toolyard.rewards.sandbox_fusion.program import calling, loading, program_in

T = TypeVar("T")
Result = bool | int
Metadata = dict[str, Any]
Semaphore = AbstractContextManager[Any]
"""A semaphore of threading or multiprocessing, or a manager's proxy."""

SERVICE, RUNTIME, TIMEOUT, COMPILE = -1, -2, -3, -4

_THREADS = 32
_FIRST_N = 10
"""Cases that `continuous` counts."""
_MEMORY_LIMIT_MB = 1024
_SERVICES_OWN = -1
"""Use the service's own default."""
_MARGIN_SECONDS = 10.0
"""What a request may take beyond its program's time limit: waiting for a worker, and the network."""
_TEXT_CHARS = 300

_NO_CASES = "Invalid input/output data"
_UNEQUAL = "Input/output count mismatch"


def compute_score(
    sandbox_fusion_url: str,
    concurrent_semaphore: Semaphore | None,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: str | Mapping[str, Any],
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[Metadata]]:
    """Return the share of test cases that the Python program in `completion` passes, and metadata for each case.

    The program is the last block fenced as python, or else the first fenced block; without any the score is 0.
    `continuous`: the share of the first ten; the others are run for their metadata. `memory_limit_mb` None: the
    service's own.

    Raises:
        GroundTruthError: `test_cases` is not valid for `check_correctness`, nor JSON of it, or empty.
        RewardError: a case that counts could not be run (-1). Then there is no score: 0 would blame the model for it.
    """
    program = program_in(completion)
    if program is None:
        return 0.0, [{"error": "Invalid completion (missing code block)"}]
    results, metadata = check_correctness(
        sandbox_fusion_url=sandbox_fusion_url,
        in_outs=_read(test_cases),
        generation=program,
        timeout=timeout,
        memory_limit_mb=_SERVICES_OWN if memory_limit_mb is None else memory_limit_mb,
        concurrent_semaphore=concurrent_semaphore,
    )
    if not results or "error" in metadata[0]:
        wrong = metadata[0]["error"] if results else "no test cases"
        raise GroundTruthError(f"test_cases {_short(str(test_cases))}: {wrong}")
    counted = results[:_FIRST_N] if continuous else results
    if SERVICE in counted:
        lost = counted.index(SERVICE)
        why = metadata[lost]["api_request_error"] or json.dumps(metadata[lost]["api_response"], default=str)
        raise RewardError(
            f"{counted.count(SERVICE)} of {len(counted)} test cases could not be run, so there is no score; "
            f"case {lost} ({metadata[lost]['status']}): {_short(why)}",
            whose=OURS,
        )
    return sum(result is True for result in counted) / len(counted), metadata


def check_correctness(
    sandbox_fusion_url: str,
    in_outs: Mapping[str, Any] | None,
    generation: str,
    timeout: float = 10,
    memory_limit_mb: int = _MEMORY_LIMIT_MB,
    language: str = "python",
    concurrent_semaphore: Semaphore | None = None,
) -> tuple[list[Result], list[Metadata]]:
    """Run `generation` on every case of `in_outs` concurrently; results and metadata are in the order of the cases.

    `in_outs`: `inputs` and `outputs`, of equal length (an output of None accepts any); or `assert_case`, code that is
    appended to the program, with or without them. `fn_name`: a function, or a method of `Solution`, that is called with
    the lines of an input, each JSON or a Python literal, and whose return value is compared; if a case has an
    `assert_case` and no output, that code calls it. `timeout`: seconds for a case, and for compiling it.

    Never raises for what the service or the program did. Invalid `in_outs` are -1 as well, explained in `error`.
    """
    if not isinstance(in_outs, Mapping):
        return [SERVICE], [{"error": _NO_CASES}]
    asserts: Sequence[str] | None = in_outs["assert_case"] if _is_list(in_outs.get("assert_case")) else None
    inputs: Any = in_outs.get("inputs", None if asserts is None else [""] * len(asserts))
    outputs: Any = in_outs.get("outputs", None if asserts is None else [None] * len(asserts))
    if not _is_list(inputs) or not _is_list(outputs):
        return [SERVICE], [{"error": _NO_CASES}]
    if len(inputs) != len(outputs) or (asserts is not None and len(asserts) != len(inputs)):
        return [SERVICE] * len(inputs), [{"error": _UNEQUAL, "case_index": index} for index in range(len(inputs))]
    broken = _FirstCompileError()
    function: str | None = in_outs.get("fn_name")

    def program(index: int) -> tuple[str, str | None]:
        """Return the program to run, and the function to call in it."""
        if asserts is None:
            return generation, function
        code = f"{generation}\n\n{asserts[index]}"
        if outputs[index] is not None or function is None or language != "python":
            return code, function
        return loading(code), None  # nothing to compare: the assertions call it themselves

    def run(index: int) -> tuple[Result, Metadata]:
        if asserts is None and (error := broken.before(index)) is not None:
            own = _metadata(index, inputs[index], outputs[index])
            return COMPILE, {**error, **{key: own[key] for key in ("case_index", "input", "expected_output")}}
        code, called = program(index)
        result, metadata = _process_single_case(
            index,
            inputs[index],
            outputs[index],
            sandbox_fusion_url,
            code,
            timeout,
            memory_limit_mb,
            language,
            concurrent_semaphore,
            called,
        )
        if result == COMPILE:
            broken.note(index, metadata)
        return result, metadata

    ended = _in_threads(run, len(inputs))
    for index, (result, metadata) in enumerate(ended):
        # Without a timeout, one program cannot compile in one case and fail to in another.
        if asserts is None and result != COMPILE and broken.before(index) is not None:
            ended[index] = COMPILE, {**metadata, "status": "compile_error_skipped"}
    return [result for result, _ in ended], [metadata for _, metadata in ended]


def _in_threads(run: Callable[[int], T], count: int) -> list[T]:
    if not count:
        return []
    executor = ThreadPoolExecutor(min(_THREADS, count), thread_name_prefix="toolyard-cases")
    try:
        return list(executor.map(run, range(count)))
    finally:
        executor.shutdown(wait=False, cancel_futures=True)  # interrupted: no further cases


class _FirstCompileError:
    """The first case of a program that showed that it does not compile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[int, Metadata] | None = None

    def note(self, index: int, metadata: Metadata) -> None:
        with self._lock:
            if self._found is None or index < self._found[0]:
                self._found = index, metadata

    def before(self, index: int) -> Metadata | None:
        found = self._found
        return found[1] if found is not None and found[0] < index else None


def _process_single_case(
    case_index: int,
    stdin_data: Any,
    expected_output: Any,
    sandbox_fusion_url: str,
    generation: str,
    timeout: float,
    memory_limit_mb: int,
    language: str,
    concurrent_semaphore: Semaphore | None = None,
    fn_name: str | None = None,
) -> tuple[Result, Metadata]:
    """Run one case; return its result and metadata. `concurrent_semaphore` is held while the service works on it."""
    metadata = _metadata(case_index, stdin_data, expected_output)
    code = calling(generation, fn_name) if fn_name and language == "python" else generation
    try:
        with concurrent_semaphore if concurrent_semaphore is not None else nullcontext():
            response, error = call_sandbox_api(
                sandbox_fusion_url=sandbox_fusion_url,
                code=code,
                stdin=metadata["input"],
                compile_timeout=timeout,
                run_timeout=timeout,
                memory_limit_mb=memory_limit_mb,
                language=language,
            )
    except Exception as raised:  # a semaphore whose manager is gone, or a patched call
        response, error = None, f"{type(raised).__name__}: {raised}"
    if response is None or error:
        metadata["api_request_error"] = error or "there was no answer, and no error"
        return SERVICE, metadata
    compiled, ran = _stage(response, "compile_result"), _stage(response, "run_result")
    result, status = _verdict(response.get("status"), compiled, ran, expected_output)
    metadata.update(
        status=status,
        api_response=response,
        api_status=response.get("status"),
        compile_status=compiled.get("status"),
        compile_duration=compiled.get("execution_time"),
        compile_stderr=compiled.get("stderr"),
        run_status=ran.get("status"),
        stdout=ran.get("stdout"),
        stderr=ran.get("stderr"),
        exit_code=ran.get("return_code"),
        duration=ran.get("execution_time"),
    )
    return result, metadata


def call_sandbox_api(
    sandbox_fusion_url: str,
    code: str,
    stdin: str | None,
    compile_timeout: float,
    run_timeout: float,
    memory_limit_mb: int,
    language: str = "python",
) -> tuple[dict[str, Any] | None, str | None]:
    """Return the service's response to `POST …/run_code` and None; or None and why there is none.

    `sandbox_fusion_url`: the full URL as in verl, or the service's base URL; empty for the embedded sandbox. It waits
    ten seconds longer than the program's time limit.
    """
    request: dict[str, Any] = {
        "code": code,
        "language": language,
        "stdin": stdin,
        "compile_timeout": compile_timeout,
        "run_timeout": run_timeout,
        "memory_limit_MB": memory_limit_mb,
        "files": {},
        "fetch_files": [],
    }
    try:
        body = json.dumps(request).encode()
        seconds = compile_timeout + run_timeout + _MARGIN_SECONDS
        answer = post(sandbox_fusion_url, body, seconds) if sandbox_fusion_url else run_here(body)
        response: Any = json.loads(answer)
        if not isinstance(response, dict):
            raise SandboxError(f"the response is not a JSON object: {_short(repr(response))}")
        return cast("dict[str, Any]", response), None
    except ToolyardError as error:
        return None, f"API Call Failed: {error}"
    except Exception as error:  # values that are not JSON, or an invalid response
        return None, f"API Call Failed: {type(error).__name__}: {error}"


# Results --------------------------------------------------------------------------------------------------------------


def _verdict(
    status: object, compiled: Mapping[str, Any], ran: Mapping[str, Any], expected_output: object
) -> tuple[Result, str]:
    """Return the result, and its name in `status`."""
    if status == "SandboxError":
        return SERVICE, "sandbox_error"
    if status == "Success":
        if ran.get("status") != "Finished":
            return SERVICE, "unexpected_success_state"
        stdout = "" if ran.get("stdout") is None else str(ran["stdout"])
        if expected_output is None or _same(stdout, str(expected_output)):
            return True, "success"
        return (SERVICE, "output_cut") if may_be_truncated(stdout, str(expected_output)) else (False, "wrong_answer")
    if status != "Failed":
        return SERVICE, f"unknown_api_status_{status}"
    if compiled.get("status") == "TimeLimitExceeded":
        return COMPILE, "compile_timeout"
    if _has_failed(compiled):
        return COMPILE, "compile_error"
    if ran.get("status") == "TimeLimitExceeded":
        return TIMEOUT, "timeout"
    if _has_failed(ran):
        return RUNTIME, "runtime_error"
    return SERVICE, "unknown_failure" if ran else "unknown_failure_state"


def _stage(response: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a stage of the response; empty if it is missing or invalid."""
    stage: Any = response.get(name)
    return cast("Mapping[str, Any]", stage) if isinstance(stage, Mapping) else {}


def _has_failed(stage: Mapping[str, Any]) -> bool:
    return stage.get("status") == "Error" or (stage.get("status") == "Finished" and stage.get("return_code") != 0)


def _same(stdout: str, expected: str) -> bool:
    """Compare by verl's rule: only line ends at the very end are ignored."""
    return stdout.rstrip("\n") == expected.rstrip("\n")


def _metadata(index: int, stdin: Any, expected: Any) -> Metadata:
    """Return the metadata of a case that has not run yet."""
    return {
        "case_index": index,
        "input": None if stdin is None else str(stdin),
        "expected_output": None if expected is None else str(expected),
        "api_request_error": None,
        "api_response": None,
        "status": "api_error",
        "stdout": None,
        "stderr": None,
        "exit_code": None,
        "duration": None,
        "compile_duration": None,
        "compile_stderr": None,
        "api_status": None,
        "compile_status": None,
        "run_status": None,
    }


# Test cases -----------------------------------------------------------------------------------------------------------


def _read(test_cases: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(test_cases, Mapping):
        return test_cases
    try:
        found: Any = json.loads(test_cases)
    except (TypeError, ValueError) as error:
        raise GroundTruthError(f"test_cases {_short(str(test_cases))}: expected JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise GroundTruthError(f"test_cases {_short(str(test_cases))}: expected an object with 'inputs' and 'outputs'")
    return cast("Mapping[str, Any]", found)


def _is_list(value: Any) -> bool:
    """Accept numpy's arrays too: data frames convert lists to them."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | Mapping)


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_CHARS else f"{text[:_TEXT_CHARS]}…"
