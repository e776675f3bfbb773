"""The file of MCP servers, the settings of MCP tools, and the names that their tools get. No server is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolyard.errors import ConfigError
from toolyard.tools.mcp.config import (
    HttpServer,
    ServerEntry,
    StdioServer,
    Transport,
    function_names,
    read_config,
    read_servers,
    select,
)


def read(folder: Path, content: Any) -> dict[str, ServerEntry]:
    path = folder / "mcp.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_servers(path)


# The file -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["mcpServers", "servers"])
def test_programs_and_services_are_read(tmp_path: Path, key: str) -> None:
    servers = {
        "files": {"command": "python", "args": ["-m", "files"], "env": {"ROOT": "/data"}, "cwd": "sub"},
        "search": {"url": "https://example.com/mcp", "headers": {"X-Key": "1"}},
    }
    found = read(tmp_path, {key: servers, "inputs": []})
    assert found["files"] == StdioServer(
        command="python", args=("-m", "files"), env={"ROOT": "/data"}, cwd=str(tmp_path / "sub")
    )
    assert found["search"] == HttpServer(url="https://example.com/mcp", headers={"X-Key": "1"})


@pytest.mark.parametrize(
    ("fields", "transport"),
    [
        ({}, Transport.HTTP),
        ({"type": "http"}, Transport.HTTP),
        ({"transport": "streamable-http"}, Transport.HTTP),
        ({"type": "streamable_http"}, Transport.HTTP),
        ({"type": "sse"}, Transport.SSE),
        ({"url": "http://example.com/sse"}, Transport.SSE),
        ({"url": "http://example.com/sse?key=1"}, Transport.SSE),
        ({"url": "http://example.com/sse", "type": "http"}, Transport.HTTP),
        ({"url": "http://example.com/assess"}, Transport.HTTP),
    ],
)
def test_the_transport_is_said_or_told_from_the_address(
    tmp_path: Path, fields: dict[str, str], transport: Transport
) -> None:
    found = read(tmp_path, {"mcpServers": {"one": {"url": "http://example.com/mcp", **fields}}})["one"]
    assert isinstance(found, HttpServer)
    assert found.transport is transport


def test_a_token_becomes_a_bearer_header_unless_the_header_is_given() -> None:
    assert HttpServer(url="http://x", auth_token="t").all_headers() == {"Authorization": "Bearer t"}
    given_one = HttpServer(url="http://x", auth_token="t", headers={"authorization": "Basic b"})
    assert given_one.all_headers() == {"authorization": "Basic b"}


def test_environment_variables_are_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_HOST", "example.com")
    monkeypatch.delenv("MCP_ABSENT", raising=False)
    content = {
        "a": {"url": "https://${MCP_HOST}/mcp", "headers": {"X": "${MCP_ABSENT:-none} $HOME ${input:key}"}},
        "b": {"command": "${MCP_ABSENT:-python}", "args": ["${MCP_HOST}"], "env": {"HOST": "${MCP_HOST}"}},
    }
    found = read(tmp_path, {"mcpServers": content})
    assert found["a"] == HttpServer(url="https://example.com/mcp", headers={"X": "none $HOME ${input:key}"})
    assert found["b"] == StdioServer(command="python", args=("example.com",), env={"HOST": "example.com"})


def test_what_other_clients_keep_there_is_left_alone(tmp_path: Path) -> None:
    servers = {
        "on": {"command": "x", "disabled": False, "description": "…", "autoApprove": ["a"], "alwaysAllow": []},
        "off": {"disabled": True, "anything": 1},
    }
    assert list(read(tmp_path, {"mcpServers": servers})) == ["on"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", ": not valid JSON: "),
        ([], ": expected a single key 'mcpServers'"),
        ({"mcpServer": {}}, ": expected a single key 'mcpServers'"),
        ({"mcpServers": {}, "servers": {}}, ": expected a single key 'mcpServers'"),
        ({"mcpServers": {}}, ": mcpServers: no server is listed"),
        ({"servers": {"one": "python"}}, ": servers.one: expected an object"),
        ({"mcpServers": {"one": {}}}, ": mcpServers.one: expected either 'command' or 'url'"),
        ({"mcpServers": {"one": {"command": "x", "url": "y"}}}, ": mcpServers.one: expected either"),
        ({"mcpServers": {"one": {"command": "x", "type": "http"}}}, ".one.type: 'http' requires 'url'"),
        ({"mcpServers": {"one": {"url": "http://x", "type": "stdio"}}}, ".one.type: 'stdio' requires 'command'"),
        ({"mcpServers": {"one": {"url": "http://x", "transport": "ws"}}}, ".one.transport: unknown 'ws'; expected one"),
        ({"mcpServers": {"one": {"command": "x", "arg": []}}}, ".one.arg: Extra inputs are not permitted; expected"),
        ({"mcpServers": {"one": {"command": "x", "args": "y"}}}, ".one.args: Input should be a valid tuple"),
        ({"mcpServers": {"one": {"command": "x", "env": {"A": 1}}}}, ".one.env.A: Input should be a valid string"),
        ({"mcpServers": {"one": {"url": "example.com"}}}, ".one.url: 'example.com' is not an http:// or https://"),
        (
            {"mcpServers": {"one": {"command": "x", "args": ["", "${MCP_ABSENT}"]}}},
            ".one.args[1]: the environment variable 'MCP_ABSENT' is not set",
        ),
    ],
)
def test_an_error_names_the_file_the_server_and_the_field(tmp_path: Path, content: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as failure:
        read(tmp_path, content)
    assert str(failure.value).startswith(f"{tmp_path}/mcp.json: ")
    assert complaint in str(failure.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        read_servers(tmp_path / "none.json")


# The settings ---------------------------------------------------------------------------------------------------------


def test_settings_of_verls_files_are_understood() -> None:
    settings = read_config({"type": "mcp", "rate_limit": 120, "timeout": 120})
    assert (settings.rate_limit, settings.timeout) == (120, 120.0)
    assert read_config({}).timeout == 30.0


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"timeouts": 1}, r"config\.timeouts: Extra inputs"),
        ({"rate_limit": 0}, r"config\.rate_limit: "),
        ({"timeout": -1}, r"config\.timeout: "),
        ({"ping_seconds": 0}, r"config\.ping_seconds: "),
        ({"call": {"retry": 1}}, r"config\.call\.retry: Extra inputs"),
    ],
)
def test_a_wrong_setting_is_named(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_config(config)


@pytest.mark.parametrize("config", [{"call": {"timeout_seconds": 35}}, {"timeout": 296}])
def test_a_call_must_have_time_for_the_ping_that_tells_a_server_that_hangs_from_a_slow_one(
    config: dict[str, Any],
) -> None:
    with pytest.raises(
        ConfigError, match=r"config\.call: timeout_seconds \(\d+ s\) must be more than timeout \+ ping_sec"
    ):
        read_config(config)


@pytest.mark.parametrize("seconds", [36, None])
def test_a_call_may_have_more_time_than_that_or_no_limit(seconds: float | None) -> None:
    assert read_config({"call": {"timeout_seconds": seconds}}).call is not None


# Names ----------------------------------------------------------------------------------------------------------------


def test_a_name_is_kept_and_gets_its_server_in_front_only_where_two_have_it() -> None:
    tools = [("web", "search"), ("mail", "search"), ("mail", "send")]
    assert function_names(tools) == ["web_search", "mail_search", "send"]


def test_characters_that_functions_may_not_have_are_replaced() -> None:
    assert function_names([("s", "files.read/all"), ("s", "größe")]) == ["files_read_all", "gr__e"]


def test_names_that_would_be_the_same_stay_different_and_the_one_that_needs_no_change_is_kept() -> None:
    plain, dotted, prefixed = function_names([("s", "a_b"), ("s", "a.b"), ("t", "c")])
    assert (plain, prefixed) == ("a_b", "c")
    assert dotted.startswith("a_b_")
    assert function_names([("s", "a.b"), ("s", "a_b")]) == [dotted, plain], "in any order"


@given(st.sets(st.tuples(st.text(max_size=70), st.text(max_size=70)), max_size=8))
def test_all_names_are_allowed_and_different(tools: set[tuple[str, str]]) -> None:
    names = function_names(sorted(tools))
    assert len(set(names)) == len(tools)
    assert all(0 < len(name) <= 64 for name in names)
    assert all(
        character.isascii() and (character.isalnum() or character in "_-") for name in names for character in name
    )


NAMES = {"web_search": "search", "mail_search": "search", "files_read": "files.read", "send": "send"}


@pytest.mark.parametrize(
    ("selected", "kept"),
    [
        (None, set(NAMES)),
        ([], set()),
        (["search"], {"web_search", "mail_search"}),
        (["mail_search", "send", "send"], {"mail_search", "send"}),
        (["files.read"], {"files_read"}),
    ],
)
def test_tools_are_selected_by_either_name(selected: list[str] | None, kept: set[str]) -> None:
    assert select(Path("mcp.json"), NAMES, selected) == kept


def test_a_selected_name_that_no_server_has_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"no server has 'serach'; available: web_search, mail_search, files_read"):
        select(Path("mcp.json"), NAMES, ["send", "serach"])


# Without the SDK ------------------------------------------------------------------------------------------------------


def test_without_the_package_the_message_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['mcp'] = None; from toolyard.tools.mcp import MCPTool"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        "toolyard.errors.MissingDependencyError: MCP tools needs 'mcp', which is not installed: "
        "pip install 'toolyard[mcp]'"
    )
