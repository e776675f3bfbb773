"""The JSON of `POST /submit`: an answer and a row of a data set in, what became of it on the row's tests out.

Fields and words are SandboxFusion's. Of its `config`, what a judge has no use for (`locale`, `is_fewshot`) is ignored.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from toolyard.sandbox.wire.programs import INCOMING, OUTGOING, RunCodeResponse, Seconds

ExtractedType = Literal["fenced", "incomplete_fenced", "heuristic", "empty"]


class TestConfig(BaseModel):
    __test__ = False  # it is no test of pytest's
    model_config = INCOMING

    dataset_type: str | None = None
    """Not looked at: the form of the row tells what it is."""
    language: str | None = None
    """None: the row's, or the answer's own."""
    compile_timeout: Seconds | None = None
    run_timeout: Seconds | None = None
    custom_extract_logic: str | None = None
    provided_data: dict[str, Any] | list[dict[str, Any]] | None = None
    """The row, or several, of which one has the request's id."""
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`run_all_cases`: go on after a test that failed."""


class SubmitRequest(BaseModel):
    model_config = INCOMING

    dataset: str
    id: int | str
    completion: str
    config: TestConfig


class EvalTestCase(BaseModel):
    model_config = OUTGOING

    passed: bool
    exec_info: RunCodeResponse
    test_info: dict[str, Any] | None = None


class EvalResult(BaseModel):
    model_config = OUTGOING

    id: int | str
    accepted: bool
    extracted_code: str
    full_code: str | None = None
    test_code: str | None = None
    tests: list[EvalTestCase]
    """In the row's order, up to the first that failed."""
    extracted_type: ExtractedType | None = None
    extra: dict[str, Any] | None = None
