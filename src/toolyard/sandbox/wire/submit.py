"""The JSON of `POST /submit`: a completion and a dataset row in, the results of the row's tests out.

Field names are SandboxFusion's. Fields of its `config` that a judge does not need (`locale`, `is_fewshot`) are ignored.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from toolyard.sandbox.wire.programs import INCOMING, OUTGOING, RunCodeResponse, Seconds

ExtractedType = Literal["fenced", "incomplete_fenced", "heuristic", "empty"]


class TestConfig(BaseModel):
    __test__ = False  # not a pytest test
    model_config = INCOMING

    dataset_type: str | None = None
    """Ignored: the form of the row shows its type."""
    language: str | None = None
    """None: the row's language, or the completion's."""
    compile_timeout: Seconds | None = None
    run_timeout: Seconds | None = None
    custom_extract_logic: str | None = None
    provided_data: dict[str, Any] | list[dict[str, Any]] | None = None
    """The row, or several rows, one of which has the request's id."""
    extra: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`run_all_cases`: continue after a failed test."""


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
    """In the row's order, up to the first failure."""
    extracted_type: ExtractedType | None = None
    extra: dict[str, Any] | None = None
