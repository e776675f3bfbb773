"""The tables of the migration guides: what they name on our side exists, and every line is tried by a test."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from toolyard.tools.verl_names import TOOLS

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
GUIDE = (DOCS / "migrating_from_verl.md").read_text()
GUIDES = ["migrating_from_verl.md", "migrating_from_sandbox_fusion.md"]
NAMES: list[tuple[str, str]] = re.findall(r"^\| `(verl\.[\w.]+)` \| `(toolyard\.[\w.]+)` \|$", GUIDE, re.MULTILINE)

TRIED = {
    # From verl: tools
    "`create` and `release` around every call (0.9)": (
        "unit/tools/test_tool_instance.py::test_an_instance_is_created_called_rewarded_and_released",
        "verl/test_tools_under_verl.py::test_create_execute_and_release_surround_every_call",
    ),
    'the code interpreter answers "no stdout here" after a failure': (
        "unit/tools/test_code_interpreter_text.py::test_what_a_program_cannot_say_itself_is_said_in_brackets",
        "unit/tools/test_code_interpreter_text.py::test_an_exit_code_that_stderr_does_not_explain_is_told",
    ),
    "stdout and stderr run into each other, at any length": (
        "unit/tools/test_code_interpreter_text.py::test_stderr_follows_stdout_on_a_line_of_its_own",
        "unit/tools/test_code_interpreter_text.py::test_each_stream_keeps_its_head_and_its_tail",
    ),
    "`sandbox_fusion_url` is needed": (
        "e2e/test_code_interpreter.py::test_a_url_left_empty_in_yaml_means_the_embedded_sandbox",
    ),
    "a timeout that the model asks for is taken as it is": (
        "e2e/test_code_interpreter_limits.py::test_a_model_whose_timeout_was_cut_is_told_so",
        "e2e/test_code_interpreter_limits.py::test_a_default_beyond_the_longest_is_the_longest",
    ),
    "`rate_limit` of the second tool is ignored silently": (
        "e2e/test_code_interpreter_limits.py::test_two_tools_with_different_limits_are_an_error_that_names_both",
    ),
    "`memory_limit_mb` is always sent": (
        "e2e/test_sandbox_fusion_peer.py::test_a_memory_limit_is_sent_only_if_somebody_set_it",
    ),
    "`mcp_servers_config_path` is relative to the current directory": (
        "e2e/test_mcp_tools.py::test_a_tool_file_of_verl_loads_as_it_is_from_the_folder_it_was_written_for",
    ),
    "an MCP server that hangs holds its trajectory": (
        "e2e/test_mcp_tools.py::test_a_call_in_flight_at_a_server_that_hangs_is_made_again_at_its_replacement",
    ),
    # From verl: the execution pool
    "a function that raises is logged, and its result is None": (
        "unit/limits/test_execution_pool.py::test_an_exception_reaches_the_caller_with_its_type_and_its_traceback",
        "cluster/test_execution_pool_on_ray.py::test_what_a_function_raises_reaches_the_caller_and_the_actor_lives_on",
    ),
    "a second pool with another `rate_limit` gets the first one's": (
        "unit/limits/test_execution_pool.py::test_another_limit_for_a_name_that_exists_is_an_error_when_the_pool_is_made",
        "cluster/test_execution_pool_on_ray.py::test_another_limit_for_a_name_that_exists_is_an_error_when_the_pool_is_made",
    ),
    "a worker that dies keeps its permit for ever": (
        "cluster/test_execution_pool_on_ray.py::test_a_killed_process_fails_one_call_and_gives_its_permit_back",
        "cluster/test_execution_pool_on_ray.py::test_when_the_actor_is_killed_its_processes_die_and_its_permits_come_back",
    ),
    "Ray is needed": ("unit/limits/test_execution_pool_closing.py::test_a_pool_without_ray_does_not_even_import_it",),
    "`PoolMode.ProcessMode` is not implemented": (
        "unit/limits/test_execution_pool_processes.py::test_cancelling_kills_what_runs_with_all_it_started_and_frees_its_permit",
    ),
    # From SandboxFusion: clients
    "PyPI package `sandbox-fusion`": ("e2e/test_sandbox_fusion_client.py::test_the_endpoint_may_be_set_once_for_all",),
    "verl's reward functions": (
        "verl/test_migrating_from_verl.py::test_verls_own_reward_runs_programs_at_our_service",
    ),
    "verl's `SandboxFusionTool`": ("verl/test_verl_rewards.py::test_both_say_the_same_of_a_program",),
    "`curl` and your own": (
        "e2e/test_service_refusals.py::test_another_type_than_json_is_415_and_nothing_runs",
        "e2e/test_service.py::test_without_the_token_nothing_runs_and_nothing_is_told",
    ),
    # Routes
    "`POST /run_code`": (
        "e2e/test_service.py::test_a_program_runs_and_the_answer_has_sandbox_fusions_fields",
        "e2e/test_languages_http.py::test_a_language_does_all_that_its_users_expect",
    ),
    "`POST /run_jupyter`": (
        "e2e/test_sandbox_fusion_client.py::test_a_notebook_keeps_its_state_and_survives_a_raising_cell",
    ),
    "`GET /v1/ping`": ("e2e/test_service.py::test_ping_answers_pong",),
    "`POST /submit`": (
        "e2e/test_service_submit.py::test_a_right_answer_is_accepted_and_every_test_is_told",
        "e2e/test_service_submit.py::test_assertions_run_after_the_program",
        "e2e/test_service_submit.py::test_rows_of_other_forms_are_read_as_everywhere",
    ),
    "`GET /list_datasets`, `POST /list_ids`, `/get_prompts`, `/get_prompt_by_id`, `/get_metrics`": (
        "e2e/test_migrating_from_sandbox_fusion.py::test_routes_about_data_sets_are_not_there",
    ),
    # What differs; of SandboxFusion's side, what the stand-in does
    "under `memory_limit_MB` numpy cannot start: the limit is one of address space": (
        "e2e/test_migrating_from_sandbox_fusion.py::test_numpy_starts_under_a_memory_limit",
        "e2e/test_sandbox_fusion_peer.py::test_the_stand_in_has_the_quirks_that_it_stands_for",
    ),
    "`memory_limit_MB` ≤ 0: no limit": (
        "e2e/test_migrating_from_sandbox_fusion.py::test_no_memory_limit_is_the_servers_own",
    ),
    "outputs of 300 KB come back cut, and nothing says so": (
        "e2e/test_migrating_from_sandbox_fusion.py::test_outputs_up_to_a_mebibyte_come_back_whole",
        "e2e/test_migrating_from_sandbox_fusion.py::test_a_client_of_ours_gets_more_and_learns_what_was_cut",
        "e2e/test_sandbox_fusion_peer.py::test_the_stand_in_has_the_quirks_that_it_stands_for",
    ),
    "a killed program does not say why": (
        "unit/sandbox/test_wire.py::test_another_limit_looks_killed_and_stderr_names_it",
    ),
    "with its default isolation (none), programs share the network, `/tmp` and the server's user": (
        "unit/test_threat_model.py",
    ),
    "requests wait until there is a worker": (
        "e2e/test_service.py::test_what_cannot_start_in_time_is_told_to_come_back",
        "e2e/test_sandbox_fusion_client.py::test_a_busy_moment_costs_a_try_and_not_the_reward",
    ),
    "any `Host`, any `Content-Type`": (
        "e2e/test_service_refusals.py::test_a_foreign_host_is_421_and_nothing_runs",
        "e2e/test_service_refusals.py::test_another_type_than_json_is_415_and_nothing_runs",
    ),
    "the client's limits are taken as they are": (
        "e2e/test_service_refusals.py::test_more_than_the_server_allows_is_422_and_names_the_maximum",
    ),
}
"""By what is in the first column."""


def rows(guide: str) -> list[str]:
    """The first columns of its tables, without those of names, which are tried below and in tests/verl."""
    lines = [line for line in (DOCS / guide).read_text().splitlines() if line.startswith("|")]
    heads = {lines[index - 1] for index, line in enumerate(lines) if set(line) <= set("|-: ")}
    bodies = [line for line in lines if line not in heads and not set(line) <= set("|-: ")]
    return [line.split(" | ")[0].removeprefix("| ") for line in bodies if not line.startswith("| `verl.")]


@pytest.mark.parametrize("row", [row for guide in GUIDES for row in rows(guide)])
def test_every_line_is_tried_by_a_test_that_exists(row: str) -> None:
    for test in TRIED[row]:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text() if name else (TESTS / file).is_file(), test


def test_nothing_is_tried_that_no_guide_has() -> None:
    assert set(TRIED) == {row for guide in GUIDES for row in rows(guide)}


def test_there_are_names() -> None:
    assert len(NAMES) > 15
    assert len(dict(NAMES)) == len(NAMES)


@pytest.mark.parametrize(("theirs", "ours"), NAMES)
def test_every_name_on_our_side_can_be_imported(theirs: str, ours: str) -> None:
    module, _, name = ours.rpartition(".")
    assert hasattr(import_module(module), name)
    assert name in ("MCPTool", theirs.rpartition(".")[2])


def test_the_guide_has_every_class_that_tool_files_may_name() -> None:
    assert TOOLS.items() <= dict(NAMES).items()


@pytest.mark.parametrize("guide", GUIDES)
def test_links_lead_somewhere(guide: str) -> None:
    for target in re.findall(r"\]\(([\w-]+\.md)(?:#[\w-]+)?\)", (DOCS / guide).read_text()):
        assert (DOCS / target).is_file(), target
