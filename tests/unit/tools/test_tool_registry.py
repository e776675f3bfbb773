"""Tools from a YAML file. Errors name the file, the entry and the field."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolyard.errors import ConfigError
from toolyard.tools import BaseTool, get_tool_class, initialize_tools_from_config, open_instances, verl_names
from toolyard.tools.code_interpreter.tool import SandboxFusionTool
from toolyard.tools.function import FunctionTool
from toolyard.tools.gsm8k import Gsm8kTool
from toolyard.tools.registry import builtin_tools

SEEDS_SAMPLE = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k"
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem"
          required: ["answer"]
"""
"""verl's gsm8k_tool_config.yaml."""

GUIDE = """
from toolyard.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse

class MyCustomTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instances = {}

    async def create(self, instance_id: str = None, **kwargs):
        # 初始化工具实例
        pass

    async def execute(self, instance_id: str, parameters: dict, **kwargs):
        # 执行工具逻辑
        pass

    async def calc_reward(self, instance_id: str, **kwargs):
        # 计算奖励
        pass

    async def release(self, instance_id: str, **kwargs):
        # 释放资源
        pass
"""
"""From verl's guide to custom tools; only the import line is changed."""

GUIDE_SCHEMA = """
    tool_schema:
      type: "function"
      function:
        name: "my_custom_function"
        description: "Description of the tool"
        parameters:
          type: "object"
          properties:
            param1:
              type: "string"
              description: "Parameter description"
          required: ["param1"]
"""

VERL_IMPORTS = ("from verl.tools.base_tool import BaseTool", "from verl.tools.schemas import")
"""The import lines as the guide has them."""
CODE_INTERPRETER = "toolyard.tools.code_interpreter.SandboxFusionTool"
numbers = itertools.count()


def verls(class_name: str, name: str, config: dict[str, Any], **properties: dict[str, Any]) -> dict[str, Any]:
    """An entry with the keys that verl's own tool files have."""
    parameters = {
        "type": "object",
        "properties": {key: {"description": "What is asked for.", **given} for key, given in properties.items()},
        "required": list(properties)[:1],
    }
    function = {"name": name, "description": "A tool of verl's.", "parameters": parameters}
    return {
        "class_name": f"verl.tools.{class_name}",
        "config": config,
        "tool_schema": {"type": "function", "function": function},
    }


BOX = {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
SERVICE = {"retrieval_service_url": "http://127.0.0.1:8000/retrieve", "num_workers": 120, "rate_limit": 120}
UNMAPPED = [
    verls("search_tool.SearchTool", "search", SERVICE, query_list={"type": "array", "item": {"type": "string"}}),
    verls("geo3k_tool.Geo3kTool", "calc_geo3k_reward", {}, answer={"type": "string"}),
    verls(
        "image_zoom_in_tool.ImageZoomInTool",
        "image_zoom_in_tool",
        {"type": "native"},
        bbox_2d=BOX,
        label={"type": "string"},
    ),
    verls("sandbox_fusion_tools.OtherTool", "other", {"type": "native"}, code={"type": "string"}),
    verls("gsm8k_tool.OtherTool", "other", {"type": "native"}, answer={"type": "string"}),
    verls("OtherTool", "other", {"type": "native"}),
]
"""Tool files of verl's whose classes have no counterpart here."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_file(text: str) -> Path:
        path = tmp_path / "tools.yaml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that can be imported; gives its name."""
    names: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(text: str) -> str:
        names.append(f"tools_of_a_test_{next(numbers)}")
        (tmp_path / f"{names[-1]}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        return names[-1]

    yield write_module
    for name in names:
        sys.modules.pop(name, None)


def refusal(path: Path) -> str:
    """The error's text, without the file's name, which must be in it."""
    with pytest.raises(ConfigError) as caught:
        initialize_tools_from_config(path)
    told = str(caught.value)
    assert told.startswith(f"{path}: ")
    return told.removeprefix(f"{path}: ")


class TestLoading:
    async def test_tools_registration(self, write, module) -> None:
        """From verl's test plan: registration and initialization."""
        name = module(GUIDE)
        path = write(
            f"""
tools:
  - class_name: {CODE_INTERPRETER}
    config:
      type: native
      num_workers: 3
      default_timeout: 7
  - class_name: "{name}.MyCustomTool"
    config:
      type: native
      custom_param: value
{GUIDE_SCHEMA}
"""
        )
        tools = initialize_tools_from_config(path)
        assert [tool.name for tool in tools] == ["code_interpreter", "my_custom_function"]
        interpreter, custom = tools
        assert isinstance(interpreter, SandboxFusionTool)
        assert (interpreter.settings.num_workers, interpreter.settings.default_timeout) == (3, 7)
        assert type(custom) is get_tool_class(f"{name}.MyCustomTool")
        assert custom.config == {"type": "native", "custom_param": "value"}
        shown = custom.get_openai_tool_schema().model_dump()
        assert shown["function"]["parameters"] == {
            "type": "object",
            "properties": {"param1": {"type": "string", "description": "Parameter description"}},
            "required": ["param1"],
        }

    async def test_the_guides_tool_lives_a_whole_trajectory_even_while_its_methods_are_empty(self, write, module):
        name = module(GUIDE)
        path = write(f"tools:\n  - class_name: {name}.MyCustomTool\n    config: {{type: native}}{GUIDE_SCHEMA}")
        tools = {tool.name: tool for tool in initialize_tools_from_config(path)}
        async with open_instances(tools, "request") as instances:
            result = await instances.call("my_custom_function", '{"param1": "x"}')
        assert (result.outcome.value, result.response.text, result.reward) == ("ok", None, None)
        assert instances["my_custom_function"].instance_id == "request"
        assert not instances["my_custom_function"].problems

    def test_the_seeds_own_file_loads_as_ours(self, write) -> None:
        (tool,) = initialize_tools_from_config(write(SEEDS_SAMPLE))
        assert type(tool) is Gsm8kTool
        assert tool.name == "calc_gsm8k_reward"

    def test_the_seeds_class_names_mean_ours_whoever_else_has_them(self, monkeypatch) -> None:
        class Theirs(BaseTool): ...

        theirs: Any = type(sys)("verl.tools.gsm8k_tool")
        theirs.Gsm8kTool = Theirs
        monkeypatch.setitem(sys.modules, "verl.tools.gsm8k_tool", theirs)
        assert get_tool_class("verl.tools.gsm8k_tool.Gsm8kTool") is Gsm8kTool

    def test_the_path_may_be_a_text(self, write) -> None:
        assert initialize_tools_from_config(str(write(SEEDS_SAMPLE)))[0].name == "calc_gsm8k_reward"

    def test_config_may_be_left_out(self, write) -> None:
        (tool,) = initialize_tools_from_config(write(f"tools: [{{class_name: {CODE_INTERPRETER}}}]"))
        assert tool.config == {"type": "native"}

    def test_there_may_be_no_tools(self, write) -> None:
        assert initialize_tools_from_config(write("tools: []")) == []

    def test_two_entries_of_one_class_are_two_tools(self, write) -> None:
        path = write(
            f"""
            tools:
              - class_name: {CODE_INTERPRETER}
              - class_name: {CODE_INTERPRETER}
                config: {{stateful: true}}
                tool_schema: {{function: {{name: notebook, parameters: {{properties: {{code: {{type: string}}}}}}}}}}
            """
        )
        assert [tool.name for tool in initialize_tools_from_config(path)] == ["code_interpreter", "notebook"]

    def test_text_in_any_language(self, write) -> None:
        path = write(
            f"""
            tools:
              - class_name: {CODE_INTERPRETER}
                tool_schema: {{function: {{name: code_interpreter, description: 运行代码}}}}
            """
        )
        assert initialize_tools_from_config(path)[0].tool_schema.function.description == "运行代码"

    async def test_a_decorated_function_is_named_like_a_class(self, write, module) -> None:
        name = module(
            """
            from toolyard.tools import tool

            @tool(config={"call": {"retries": 0}})
            def shout(text: str, times: int = 1) -> str:
                '''Say it loudly.'''
                return text.upper() * times
            """
        )
        path = write(f"tools: [{{class_name: {name}.shout, config: {{call: {{timeout_seconds: 5}}}}}}]")
        (tool,) = initialize_tools_from_config(path)
        assert isinstance(tool, FunctionTool)
        assert tool is not get_tool_class(f"{name}.shout")
        assert tool.config == {"call": {"timeout_seconds": 5}}
        async with open_instances({tool.name: tool}, "request") as instances:
            assert (await instances.call("shout", '{"text": "ho", "times": 2}')).response.text == "HOHO"

    def test_our_own_tools_need_no_file(self) -> None:
        assert [tool.name for tool in builtin_tools()] == ["code_interpreter", "calc_gsm8k_reward"]


class TestTheFile:
    def test_that_is_not_there(self, tmp_path) -> None:
        assert refusal(tmp_path / "none.yaml") == "cannot be read: No such file or directory"

    def test_that_is_a_folder(self, tmp_path) -> None:
        assert refusal(tmp_path) == "cannot be read: Is a directory"

    def test_that_is_empty(self, write) -> None:
        assert refusal(write("")) == "the file is empty; expected a list under the key 'tools'"

    @pytest.mark.parametrize("text", ["- a\n- b", "tools: nothing", "tools: {a: 1}", "tool: []", "just text", "3"])
    def test_that_holds_something_else(self, write, text: str) -> None:
        assert refusal(write(text)) == "expected a list under the key 'tools'"

    @pytest.mark.parametrize("text", ["tools: [", "tools:\n\t- a", "tools: !!python/object:os.system {}"])
    def test_that_is_not_yaml(self, write, text: str) -> None:
        assert refusal(write(text)).startswith("not valid YAML: ")

    def test_that_is_not_text(self, tmp_path) -> None:
        path = tmp_path / "tools.yaml"
        path.write_bytes(b"tools: \xff\xff")
        assert refusal(path).startswith("not valid YAML: ")

    def test_that_is_nested_without_end(self, write) -> None:
        assert refusal(write("tools: " + "[" * 50_000)).startswith("not valid YAML: ")

    def test_with_an_unknown_key(self, write) -> None:
        assert refusal(write("tools: []\nextra: 1")) == "unknown key 'extra'; expected only 'tools'"


class TestTheEntry:
    @staticmethod
    def entry(text: str) -> str:
        return f"tools:\n  - class_name: {CODE_INTERPRETER}\n{textwrap.indent(textwrap.dedent(text), '    ')}"

    def test_that_is_no_mapping(self, write) -> None:
        told = refusal(write("tools: [{class_name: a.B, config: {}}, just text]"))
        assert told == "tools[1]: expected a mapping with the key 'class_name', not 'just text'"

    def test_without_a_class(self, write) -> None:
        assert refusal(write("tools: [{config: {type: native}}]")) == "tools[0]: the key 'class_name' is missing"

    def test_with_an_unknown_key(self, write) -> None:
        told = refusal(write(self.entry("schema: {}")))
        assert told == "tools[0]: unknown key 'schema'; expected one of class_name, config, tool_schema, mcp"

    def test_whose_config_is_no_mapping(self, write) -> None:
        told = refusal(write(self.entry("config: native")))
        assert told == "tools[0].config: Input should be a valid dictionary, not 'native'"

    def test_with_an_unknown_type(self, write) -> None:
        told = refusal(write(self.entry("config: {type: remote}")))
        assert told == "tools[0].config.type: unknown type 'remote'; expected one of native, mcp"

    def test_with_an_unknown_key_in_config(self, write) -> None:
        told = refusal(write(self.entry("config: {workers: 3}")))
        assert told.startswith("tools[0]: config")
        assert "workers" in told

    def test_with_an_unknown_key_in_call(self, write) -> None:
        told = refusal(write(self.entry("config: {call: {timeout: 3}}")))
        assert told.startswith("tools[0].config.call: unknown key 'timeout'; expected one of timeout_seconds, ")

    def test_with_a_wrong_value_in_call(self, write) -> None:
        told = refusal(write(self.entry("config: {call: {retries: -1}}")))
        assert told == "tools[0].config.call.retries: Input should be greater than or equal to 0, not -1"

    def test_with_a_call_that_is_no_mapping(self, write) -> None:
        assert refusal(write(self.entry("config: {call: fast}"))).startswith("tools[0].config.call: ")

    def test_whose_schema_has_no_name(self, write) -> None:
        told = refusal(write(self.entry("tool_schema: {type: function, function: {description: x}}")))
        assert told == "tools[0].tool_schema.function: the key 'name' is missing"

    def test_whose_schema_has_no_function(self, write) -> None:
        told = refusal(write(self.entry("tool_schema: {type: function}")))
        assert told == "tools[0].tool_schema: the key 'function' is missing"

    def test_whose_schema_has_properties_that_are_none(self, write) -> None:
        schema = "tool_schema: {function: {name: x, parameters: {properties: [code]}}}"
        told = refusal(write(self.entry(schema)))
        assert told.startswith("tools[0].tool_schema.function.parameters.properties: Input should be a valid dict")
        assert told.endswith("not ['code']")

    def test_whose_schema_is_no_json_schema(self, write) -> None:
        schema = "tool_schema: {function: {name: x, parameters: {properties: {code: {type: strng}}}}}"
        told = refusal(write(self.entry(schema)))
        assert told.startswith("tools[0]: tool 'x': its parameters are not a JSON Schema: ")
        assert "strng" in told

    def test_of_a_class_that_needs_a_schema_and_has_none(self, write, module) -> None:
        name = module("from toolyard.tools import BaseTool\nclass Bare(BaseTool): ...")
        told = refusal(write(f"tools: [{{class_name: {name}.Bare}}]"))
        assert told == "tools[0]: Bare has no schema of its own: give it a tool_schema"

    def test_with_the_name_of_another_tool(self, write) -> None:
        told = refusal(write(f"tools: [{{class_name: {CODE_INTERPRETER}}}, {{class_name: {CODE_INTERPRETER}}}]"))
        assert told == "tools[1]: a second tool named 'code_interpreter'; the first is tools[0]"


class TestMcpEntries:
    MCP = "toolyard.tools.mcp.MCPTool"

    def test_without_the_key_mcp(self, write) -> None:
        told = refusal(write(f"tools: [{{class_name: {self.MCP}, config: {{type: mcp}}}}]"))
        assert told == "tools[0]: the key 'mcp' is missing, which config.type mcp needs"

    def test_with_the_key_mcp_and_another_type(self, write) -> None:
        told = refusal(write(f"tools: [{{class_name: {self.MCP}, mcp: {{mcp_servers_config_path: x.json}}}}]"))
        assert told == "tools[0].mcp: only allowed with config.type mcp, but this entry has native"

    def test_without_a_path(self, write) -> None:
        told = refusal(write(f"tools: [{{class_name: {self.MCP}, config: {{type: mcp}}, mcp: {{}}}}]"))
        assert told == "tools[0].mcp: the key 'mcp_servers_config_path' is missing"

    def test_with_an_unknown_key(self, write) -> None:
        mcp = "{mcp_servers_config_path: x.json, tools: [a]}"
        told = refusal(write(f"tools: [{{class_name: {self.MCP}, config: {{type: mcp}}, mcp: {mcp}}}]"))
        assert told == (
            "tools[0].mcp: unknown key 'tools'; expected one of mcp_servers_config_path, tool_selected_list"
        )

    def test_with_a_schema(self, write) -> None:
        rest = "mcp: {mcp_servers_config_path: x.json}, tool_schema: {function: {name: x}}"
        told = refusal(write(f"tools: [{{class_name: {self.MCP}, config: {{type: mcp}}, {rest}}}]"))
        assert told == "tools[0].tool_schema: not allowed with config.type mcp; the schemas come from the server"


class TestTheClass:
    @staticmethod
    def of(class_name: str) -> str:
        return f"tools: [{{class_name: {class_name!r}}}]"

    def test_whose_module_is_not_there(self, write) -> None:
        told = refusal(write(self.of("my_missing_tools.search.Search")))
        assert told.startswith("tools[0]: class_name 'my_missing_tools.search.Search': no module named ")
        assert "'my_missing_tools'" in told
        assert "PYTHONPATH" in told

    def test_that_is_not_in_its_module(self, write) -> None:
        told = refusal(write(self.of("toolyard.tools.base.Missing")))
        assert told == (
            "tools[0]: class_name 'toolyard.tools.base.Missing': module 'toolyard.tools.base' has no 'Missing'"
        )

    def test_without_a_module(self, write) -> None:
        assert refusal(write(self.of("Search"))) == (
            "tools[0]: class_name 'Search': expected a dotted name, module.Class"
        )

    @pytest.mark.parametrize("dots", [".", "..", ".Search", "a..B"])
    def test_with_dots_and_nothing_between(self, write, dots: str) -> None:
        assert refusal(write(self.of(dots))).startswith(f"tools[0]: class_name {dots!r}: ")

    def test_whose_module_cannot_be_imported(self, write, module) -> None:
        name = module("raise OSError('no licence')")
        told = refusal(write(self.of(f"{name}.Search")))
        assert told == f"tools[0]: class_name '{name}.Search': importing {name} failed: OSError: no licence"

    def test_whose_module_lacks_another_module(self, write, module) -> None:
        name = module("import some_missing_dependency")
        told = refusal(write(self.of(f"{name}.Search")))
        assert f"importing {name} failed: ModuleNotFoundError: No module named 'some_missing_dependency'" in told

    @pytest.mark.parametrize("entry", UNMAPPED, ids=lambda entry: entry["class_name"].rpartition(".")[2])
    def test_of_verl_that_has_no_counterpart_is_told_which_have(self, write, entry: dict[str, Any]) -> None:
        told = refusal(write(yaml.safe_dump({"tools": [entry]})))
        assert told == (
            f"tools[0]: class_name '{entry['class_name']}': Toolyard does not provide this tool of verl's; it provides "
            "verl.tools.gsm8k_tool.Gsm8kTool, verl.tools.mcp_base_tool.MCPBaseTool, "
            "verl.tools.mcp_search_tool.MCPSearchTool, verl.tools.sandbox_fusion_tools.SandboxFusionTool"
        )

    def test_of_verls_code_interpreter_is_ours_with_all_its_settings(self, write) -> None:
        settings = {
            "sandbox_fusion_url": "http://127.0.0.1:9/run_code",
            "num_workers": 4,
            "enable_global_rate_limit": True,
            "rate_limit": 4,
            "default_timeout": 20,
            "default_language": "python",
            "memory_limit_mb": 1024,
            "type": "native",
        }
        entry = verls("sandbox_fusion_tools.SandboxFusionTool", "code_interpreter", settings, code={"type": "string"})
        [tool] = initialize_tools_from_config(write(yaml.safe_dump({"tools": [entry]})))
        assert type(tool) is SandboxFusionTool
        assert tool.name == "code_interpreter"

    def test_of_an_installed_verl_is_told_the_same(self, write, monkeypatch) -> None:
        theirs: Any = type(sys)("verl.tools.search_tool")
        theirs.SearchTool = type("SearchTool", (), {})
        monkeypatch.setitem(sys.modules, "verl.tools.search_tool", theirs)
        assert "it provides verl.tools.gsm8k_tool.Gsm8kTool" in refusal(
            write(self.of("verl.tools.search_tool.SearchTool"))
        )

    def test_whose_module_imports_from_verl_is_told_the_line_to_write(self, write, module, tmp_path) -> None:
        name = module(GUIDE.replace("from toolyard.tools import BaseTool,", "\n".join(VERL_IMPORTS)))
        told = refusal(write(self.of(f"{name}.MyCustomTool")))
        assert told == (
            f"tools[0]: class_name '{name}.MyCustomTool': {tmp_path / name}.py, line 2: this line imports verl, which "
            "is not installed; write `from toolyard.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse`"
        )

    @pytest.mark.parametrize(
        ("line", "instead"),
        [
            ("from verl.tools.base_tool import BaseTool as Base", "`from toolyard.tools import BaseTool as Base`"),
            (
                "from verl.tools.schemas import OpenAIFunctionSchema, ToolResponse",
                "`from toolyard.messages import OpenAIFunctionSchema` and `from toolyard.tools import ToolResponse`",
            ),
            (
                "from verl.tools.schemas import OpenAIFunctionToolCall\nfrom verl.utils.tracing import trace",
                (
                    "`from toolyard.messages import OpenAIFunctionToolCall`; there is no equivalent for "
                    "verl.utils.tracing.trace"
                ),
            ),
            ("from verl.tools.gsm8k_tool import Gsm8kTool", "`from toolyard.tools.gsm8k import Gsm8kTool`"),
            (
                "from verl.tools.utils.tool_registry import initialize_tools_from_config",
                "`from toolyard.tools import initialize_tools_from_config`",
            ),
        ],
    )
    def test_every_import_from_verl_has_its_answer(self, write, module, line: str, instead: str) -> None:
        name = module(line)
        told = refusal(write(self.of(f"{name}.Search")))
        assert told.endswith(f", line 1: this line imports verl, which is not installed; write {instead}")

    def test_whose_module_imports_a_module_of_verl_is_told_where_its_names_are(self, write, module) -> None:
        told = refusal(write(self.of(f"{module('import verl.tools.base_tool')}.Search")))
        assert told.endswith("this line imports verl, which is not installed; its equivalents are in toolyard.tools")

    def test_the_lines_that_are_told_can_be_imported(self) -> None:
        for name, home in verl_names._MODULES.items():
            assert hasattr(importlib.import_module(home), name)
        assert all(map(get_tool_class, verl_names.TOOLS))

    def test_whose_module_imports_one_that_imports_from_verl_names_that_file(self, write, module, tmp_path) -> None:
        inner = module("\n\nfrom verl.tools.base_tool import BaseTool")
        outer = module(f"import {inner}")
        assert f"{tmp_path / inner}.py, line 3: " in refusal(write(self.of(f"{outer}.Search")))

    def test_whose_module_decorates_a_function_wrongly(self, write, module) -> None:
        name = module("from toolyard.tools import tool\n@tool\ndef search(text): ...")
        told = refusal(write(self.of(f"{name}.search")))
        assert f"importing {name} failed: @tool {name}.search: parameter 'text' has no annotation" in told

    @pytest.mark.parametrize("what", ["pathlib.Path", "os.getcwd", "toolyard.tools.base.uuid4", "sys.path"])
    def test_that_is_no_tool(self, write, what: str) -> None:
        told = refusal(write(self.of(what)))
        assert told.startswith(f"tools[0]: class_name {what!r}: ")
        assert told.endswith("is neither a subclass of toolyard.tools.BaseTool nor a function with @tool")

    def test_whose_constructor_raises(self, write, module) -> None:
        name = module(
            """
            from toolyard.tools import BaseTool
            class Search(BaseTool):
                def __init__(self, config, tool_schema):
                    raise KeyError("api_key")
            """
        )
        told = refusal(write(self.of(f"{name}.Search")))
        assert told == f"tools[0]: {name}.Search could not be created: KeyError: 'api_key'"

    def test_whose_constructor_forgets_its_parents(self, write, module) -> None:
        name = module(
            """
            from toolyard.tools import BaseTool
            class Search(BaseTool):
                def __init__(self, config, tool_schema):
                    self.ready = True
            """
        )
        assert f"tools[0]: {name}.Search could not be created: AttributeError: " in refusal(
            write(self.of(f"{name}.Search"))
        )

    def test_a_function_that_is_given_a_config_it_does_not_know(self, write, module) -> None:
        name = module("from toolyard.tools import tool\n@tool\ndef search(text: str): ...")
        told = refusal(write(f"tools: [{{class_name: {name}.search, config: {{speed: 3}}}}]"))
        assert told == f"tools[0]: @tool {name}.search: config: unknown key 'speed'; a function's are type, call"


class TestFailureLeavesNothing:
    CLOSING = """
        from toolyard.tools import BaseTool, OpenAIFunctionToolSchema
        made, closed = [], []
        class Search(BaseTool):
            def __init__(self, config, tool_schema):
                super().__init__(config, tool_schema)
                made.append(self)
            async def close(self):
                closed.append(self)
    """

    def test_tools_that_were_made_before_a_bad_entry_are_closed(self, write, module) -> None:
        name = module(self.CLOSING)
        good = f"{{class_name: {name}.Search, tool_schema: {{function: {{name: search}}}}}}"
        assert refusal(write(f"tools: [{good}, {{class_name: no_such_module.Tool}}]")).startswith("tools[1]: ")
        found = sys.modules[name]
        assert len(found.made) == 1
        assert found.closed == found.made

    def test_nothing_is_made_where_the_file_itself_is_wrong(self, write, module) -> None:
        name = module(self.CLOSING)
        good = f"{{class_name: {name}.Search, tool_schema: {{function: {{name: search}}}}}}"
        assert refusal(write(f"tools: [{good}, {{class_name: a.B, typo: 1}}]")).startswith("tools[1]: unknown key")
        assert name not in sys.modules

    async def test_also_from_within_an_event_loop(self, write, module) -> None:
        name = module(self.CLOSING)
        good = f"{{class_name: {name}.Search, tool_schema: {{function: {{name: search}}}}}}"
        assert refusal(write(f"tools: [{good}, {good}]")).startswith("tools[1]: a second tool named 'search'")
        assert len(sys.modules[name].closed) == 2
