"""What `toolyard export` does: find the run's tools and chat format, write the file, and say what was left out."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import ValidationError
from rich.progress import MofNCompleteColumn

from toolyard.cli.console import INTERRUPTED, complete, err
from toolyard.cli.view.run import open_library, progress_bar
from toolyard.errors import ConfigError
from toolyard.evaluation.runs import pooled_runs, torn_lines
from toolyard.export.rendering import Match, PlainWriting, TemplateWriting
from toolyard.export.sft import SftRules, SftSummary, write_sft
from toolyard.messages import JSON, OpenAIFunctionToolSchema
from toolyard.rollout.assembly import schemas_of
from toolyard.rollout.config import SETTINGS_BESIDE_DUMP, ChatConfig, RolloutConfig
from toolyard.rollout.fingerprint import saved_settings
from toolyard.viewer.query import parse_query


def export_sft(
    path: Path, target: Path, query: str, rules: SftRules, *, tools: Path | None, tokenizer: str | None, force: bool
) -> None:
    """
    Raises:
        ToolyardError: the dump, the query, the tools, the tokenizer or the target is wrong, or nothing can be written.
    """
    if rules.exact and tokenizer is None:
        raise ConfigError("--exact compares tokens: name the model with --tokenizer")
    asked = parse_query(query)
    settings = saved_settings(path) or {}
    if not settings and tokenizer is not None:
        text = f"{path} has no {SETTINGS_BESIDE_DUMP}: the template is used as for default chat settings"
        err().print(text, style="yellow", markup=False)
    schemas = _schemas(settings, tools, path)
    writing = PlainWriting(schemas) if tokenizer is None else _template_writing(settings, tokenizer, schemas)
    with open_library(path) as library, progress_bar(MofNCompleteColumn()) as progress:
        bar = progress.add_task("exporting")
        try:
            done = write_sft(
                library,
                target,
                asked,
                writing,
                rules,
                overwrite=force,
                progress=lambda looked_at, total: progress.update(bar, completed=looked_at, total=total),
            )
        except KeyboardInterrupt:
            err().print("interrupted; nothing was written", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
    if len(done.runs) > 1:
        err().print(pooled_runs(path, done.runs), style="yellow", markup=False)
    _tell(done, target, has_tools=bool(schemas), rules=rules)


def _tell(done: SftSummary, target: Path, *, has_tools: bool, rules: SftRules) -> None:
    def say(text: str, style: str = "") -> None:
        err().print(text, style=style, markup=False)

    tasks = f"{done.tasks:,} {'task' if done.tasks == 1 else 'tasks'}"
    many = "conversation" if done.conversations == 1 else "conversations"
    say(f"{target}: {done.conversations:,} {many} of {tasks}, {done.size / 1e6:.1f} MB")
    left_out = [f"{count:,} {reason}" for reason, count in done.left_out.most_common()]
    left_out += [torn_lines(done.torn)] if done.torn else []
    left_out += [f"{done.over_limit:,} beyond --per-task or --limit"] if done.over_limit else []
    if left_out:
        say(f"left out: {', '.join(left_out)}")
    if done.matches:
        same, other = done.matches[Match.SAME_TEXT], done.matches[Match.DIFFERENT]
        text = f"the template renders {done.matches[Match.EXACT]:,} to exactly the sampled tokens"
        text += f", {same:,} to the same text in other tokens" if same else ""
        text += f", {other:,} to other text" if other else ""
        say(text, "yellow" if other else "")
    if done.difference:
        say(f"first difference: {done.difference}", "yellow")
    if done.with_calls and not has_tools:
        say(f"{done.with_calls:,} call tools, but no schemas are known: no tools column (see --tools)", "yellow")
    if done.with_examples and rules.format == "messages":
        say(
            f"{done.with_examples:,} have assistant messages in their prompt, which would also be trained on: "
            "--format prompt-completion separates them",
            "yellow",
        )


def _schemas(settings: JSON, tools: Path | None, path: Path) -> list[OpenAIFunctionToolSchema]:
    if tools is None:
        if not settings or settings.get("agent") is not None:
            return []  # an agent has its own
        named = settings.get("tools")
        if named is not None and not Path(str(named)).is_file():
            raise ConfigError(f"{path} used the tools in {named}, which does not exist: set --tools")
        tools = None if named is None else Path(str(named))
    return complete(schemas_of(RolloutConfig(tools=None if tools is None else str(tools))))


def _template_writing(settings: JSON, tokenizer: str, schemas: list[OpenAIFunctionToolSchema]) -> TemplateWriting:
    from toolyard.chat.formats import open_format
    from toolyard.chat.template import TemplateFormat
    from toolyard.chat.tokenizers.opening import load_tokenizer
    from toolyard.engines.models import resolve_model

    try:
        chat = ChatConfig.model_validate(settings.get("chat") or {})
    except ValidationError as error:
        raise ConfigError(f"{SETTINGS_BESIDE_DUMP}: the chat settings of the run cannot be read: {error}") from None
    loaded = load_tokenizer(resolve_model(tokenizer))
    opened = open_format(
        loaded,
        format=chat.format,
        chat_template=chat.chat_template,
        tool_role=chat.tool_role,
        tool_wrapper=chat.tool_wrapper,
        template_kwargs=chat.template_kwargs,
        syntax_options=chat.syntax_options,
    )
    if not isinstance(opened, TemplateFormat):
        raise ConfigError(f"--tokenizer: the run's chat format {chat.format!r} has no template; export without it")
    return TemplateWriting(opened, loaded, schemas)
