"use strict";
// Groups, calls and changes of tasks, computed in pages without a server as `toolyard.viewer` computes them.
(() => {
  const { Toolyard } = window;
  const SOLVED = 0.999;
  const ERRORS = 100, SLOWEST = 50, MEMBERS = 100; // as many as the server answers
  const run = ({ file }) => file.slice(0, Math.max(file.lastIndexOf("/"), 0));
  const compared = (one, other) => (one < other ? -1 : one > other ? 1 : 0);
  const by = (...fields) => (one, other) => fields.reduce((order, field) => order || compared(field(one), field(other)), 0);
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value / values.length, 0) : null);
  const known = (values) => values.filter((value) => value !== null);
  const grouped = (items, key) => {
    const found = new Map();
    for (const one of items) {
      const name = JSON.stringify(key(one));
      if (!found.has(name)) found.set(name, []);
      found.get(name).push(one);
    }
    return [...found.values()];
  };
  const tally = (names) => {
    const counts = grouped(names, (name) => name).map((same) => [same[0], same.length]);
    return Object.fromEntries(counts.sort((one, other) => other[1] - one[1]));
  };
  const samples = (rows) => rows.filter((row) => !row.damaged).sort(
    by((row) => row.step, run, (row) => row.group_id, (row) => row.task, (row) => row.sample, (row) => row.number));

  // Groups -----------------------------------------------------------------------------------------------------------

  const kindOf = (scores) => {
    const different = new Set(scores);
    if (!different.size) return "unscored";
    if (different.size > 1) return "mixed";
    return { 0: "all 0", 1: "all 1" }[scores[0]] ?? "all equal";
  };
  const group = (rows) => {
    const scores = known(rows.map((row) => row.score)), middle = mean(scores);
    const std = scores.length < 2 ? null : Math.hypot(...scores.map((score) => score - middle)) / Math.sqrt(scores.length - 1);
    const advantage = (score) => (score === null || std === null ? null : std ? (score - middle) / std : 0);
    const { step, group_id, task, preview, truth } = rows[0];
    const members = rows.map(({ key, sample, score, finish, state, failure }) => (
      { key, sample, score, advantage: advantage(score), finish, failure: state === "FAILED" ? failure || finish : "" }));
    return { step, run: run(rows[0]), group_id, task, preview, truth, kind: kindOf(scores), size: rows.length, members: members.slice(0, MEMBERS), mean: middle, std,
      failed: members.filter((one) => one.failure).length, first: Math.min(...rows.map((row) => row.number)) };
  };
  const SORTS = new Map([["mean", (one) => one.mean], ["std", (one) => one.std], ["failed", (one) => one.failed],
    ["size", (one) => one.size]]);

  Toolyard.groupsOf = (rows, { kind, sort = "", offset = 0, limit = 100 }) => {
    const all = grouped(samples(rows), (row) => [row.step, run(row), row.group_id, row.task]).map(group);
    all.sort(by((one) => one.step, (one) => one.first));
    const chosen = all.filter((one) => !kind || one.kind === kind);
    const value = SORTS.get(sort.replace(/^-/, ""));
    if (value) {
      const sign = sort.startsWith("-") ? -1 : 1;
      chosen.sort(by((one) => value(one) === null, (one) => sign * value(one)));
    }
    return { count: chosen.length, kinds: tally(all.map((one) => one.kind)),
      largest: Math.max(0, ...all.map((one) => one.size)), groups: chosen.slice(offset, offset + limit).map(({ first, ...told }) => told) };
  };

  // Changes ----------------------------------------------------------------------------------------------------------

  const changed = (before, after) => {
    if (!before.length || !after.length) return after.length ? "new" : "gone";
    const [was, isNow] = [before, after].map((scores) => Math.max(...scores) >= SOLVED);
    if (was !== isNow) return isNow ? "solved" : "broken";
    const change = mean(after) - mean(before);
    return Math.abs(change) < 1e-9 ? "same" : change > 0 ? "better" : "worse";
  };
  const change = (sides) => {
    const [before, after] = [0, 1].map((side) => sides.filter((one) => one.side === side).map((one) => one.row));
    const scores = [before, after].map((rows) => known(rows.map((row) => row.score)));
    const [was, isNow] = scores.map(mean);
    const { group_id, task, preview, truth } = (after[0] ?? before[0]);
    return { group_id, task, preview, truth, kind: changed(...scores), before: was, after: isNow,
      change: was === null || isNow === null ? null : isNow - was, count_before: before.length, count_after: after.length };
  };
  Toolyard.changesBetween = (before, after, { kind, offset = 0, limit = 100 }) => {
    const both = [before, after].flatMap((rows, side) => samples(rows).map((row) => ({ row, side })));
    const all = grouped(both, ({ row }) => [row.group_id, row.task]).map(change);
    all.sort(by((one) => one.change === null, (one) => one.change ?? 0));
    const scored = all.filter((one) => one.change !== null);
    const chosen = all.filter((one) => !kind || one.kind === kind);
    return { count: chosen.length, kinds: tally(all.map((one) => one.kind)), tasks: scored.length,
      before: mean(scored.map((one) => one.before)), after: mean(scored.map((one) => one.after)),
      changes: chosen.slice(offset, offset + limit) };
  };

  // Calls ------------------------------------------------------------------------------------------------------------

  const percentile = (ordered, share) => (ordered.length ? ordered[Math.max(0, Math.ceil(ordered.length * share) - 1)] : null);
  const ofTool = (calls) => {
    const [times, waits] = ["seconds", "wait"].map((name) => known(calls.map((call) => call[name])).sort((a, b) => a - b));
    return { tool: calls[0].tool, calls: calls.length, failed: calls.filter((call) => call.failed).length,
      verdicts: tally(calls.map((call) => call.verdict)), p50: percentile(times, 0.5), p95: percentile(times, 0.95),
      longest: times.at(-1) ?? null, wait_p50: percentile(waits, 0.5), wait_p95: percentile(waits, 0.95) };
  };
  // `calls`: each with the row it belongs to.
  Toolyard.callReport = (calls) => {
    const where = ({ row: { key, request_id, step, number }, turn, verdict }) => ({ key, request_id, step, number, turn, verdict });
    const said = (call) => call.error || call.verdict;
    const errors = grouped(calls.filter((call) => call.failed), (call) => [call.tool, said(call)]).map((same) => (
      { tool: same[0].tool, error: said(same[0]), calls: same.length, ...where(same[0]) }));
    const slowest = calls.filter((call) => call.seconds !== null).map((call) => (
      { tool: call.tool, seconds: call.seconds, wait: call.wait, ...where(call) }));
    return {
      tools: grouped(calls, (call) => call.tool).map(ofTool).sort(by((one) => -one.calls, (one) => one.tool)),
      errors: errors.sort(by((one) => -one.calls)).slice(0, ERRORS),
      slowest: slowest.sort(by((one) => -one.seconds)).slice(0, SLOWEST) };
  };

  // Suggestions ------------------------------------------------------------------------------------------------------

  Toolyard.frequent = (values, part) => {
    const wanted = part.toLowerCase();
    const found = Object.entries(tally(values.filter((value) => value && value.toLowerCase().includes(wanted))));
    found.sort(by(([value]) => !value.toLowerCase().startsWith(wanted), ([, times]) => -times, ([value]) => value));
    return found.slice(0, 20).map(([value, times]) => [Toolyard.quoted(value), times]);
  };
})();
