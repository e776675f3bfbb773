"use strict";
// What colors mean, in charts, badges, lists and timelines: one table. The colors, and a sign for each meaning, are in style.css.
(() => {
  const { Toolyard } = window;
  const { el } = Toolyard;

  // Finish reasons, then verdicts and outcomes of calls, by meaning; in the order in which charts stack them.
  const MEANINGS = Object.entries({
    // Infrastructure failure: it says nothing about the model.
    bad: [["engine_failure", "tool_failure", "interaction_failure", "agent_failure", "reward_failure", "internal_error",
      "request_deadline", "stage_deadline", "idle", "aborted", "cannot_continue", "token_drift", "bad_task", "prompt_too_long"]],
    // Cut off at a limit.
    cut: [["length", "max_assistant_turns", "length_before_generation", "tool_response_too_long", "max_user_turns"],
      ["timed_out", "memory_exceeded", "cpu_exceeded", "output_exceeded", "disk_exceeded"]],
    // The model's mistake.
    fault: [["malformed_calls"],
      ["failed", "bad_arguments", "signaled", "compile_failed", "malformed", "unknown_tool", "raised"]],
    none: [["unknown", "interaction_ended"], ["not answered", ""]],
    good: [["stop"], ["ok"]],
  });
  const KNOWN = new Map(MEANINGS.flatMap(([kind, lists], order) => lists.flatMap((names) => names.map((name, at) =>
    [name, { kind, hue: `hue-${kind} shade-${at % 3}`, order: 1000 * order + at }]))));
  const FURTHER = 5; // colors of other names; a name always has the same one
  const AFTER_FAULTS = 2999;

  const look = (name) => KNOWN.get(name) || { kind: "none", order: AFTER_FAULTS,
    hue: `further-${[...name].reduce((sum, char) => (31 * sum + char.codePointAt(0)) % 65536, 0) % FURTHER}` };

  // good, bad (infrastructure failure), cut (at a limit), fault (the model's) or none.
  Toolyard.kind = (name) => look(name).kind;
  // The classes that color the mark of a name in a chart.
  Toolyard.hue = (name) => look(name).hue;
  Toolyard.inPaletteOrder = (names) =>
    [...names].sort((one, other) => look(one).order - look(other).order || (one < other ? -1 : 1));
  Toolyard.badge = (name, kind = Toolyard.kind(name), title = null) => el(`span.badge.${kind}`, { title }, name);

  // Only a full score has a color: a low one is no failure of ours.
  Toolyard.scoreClass = (score) => (typeof score !== "number" ? "none" : score >= 0.999 ? "good" : "plain");
  Toolyard.failed = (row) => row.state === "FAILED";
})();
