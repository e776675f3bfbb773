"use strict";
// Charts over all steps, and the page of one step.
(() => {
  const { Toolyard } = window;
  const { el, number, seconds, count } = Toolyard;
  const LISTED = 200;
  const COLUMNS = [["trajectories", "count"], ["failed", "failed"], ["mean score", "mean_score"], ["min", "min_score"], ["max", "max_score"],
    ["turns", "mean_turns"], ["calls", "mean_tools"], ["tokens", "mean_response_tokens"], ["seconds", "mean_seconds"],
    ["damaged", "damaged"]];
  const LOUD = new Set(["failed", "damaged"]);
  // Title, name, unit, and the field to filter by.
  const MEASURES = [["Score distribution", "score", "score", "score"], ["Turns per request", "turns", "turns", "turns"],
    ["Tool calls per request", "tools", "calls", "tools"], ["Response tokens", "response_tokens", "tokens", "length"],
    ["Request time", "seconds", "seconds", "time"]];

  const table = (steps, query) => {
    const link = (step) => el("a", { href: Toolyard.address(["step", step], { q: query }) }, `${step}`);
    const row = (one) => el("tr", el("td", link(one.step)),
      COLUMNS.map(([, name]) => el(LOUD.has(name) && one[name] ? "td.right.bad.mark" : "td.right", number(one[name]))));
    const body = el("tbody", steps.slice(0, LISTED).map(row));
    const showRest = () => {
      body.append(...steps.slice(LISTED).map(row));
      more.remove();
    };
    const more = el("button", { type: "button", onclick: showRest }, `show ${count(steps.length - LISTED, "more step")}`);
    const head = el("thead", el("tr", el("th", "step"), COLUMNS.map(([name]) => el("th.right", name))));
    return [el("div.scroll", el("table.steps", head, body)), steps.length > LISTED ? more : null];
  };

  const distributions = (told, step) =>
    MEASURES.map(([title, name, unit, field]) => Toolyard.distribution(title, unit, told[name], [step, field]));

  // A single step has distributions instead of curves.
  const oneStep = (summary, told) => {
    const step = `step:${summary.step}`;
    return el("div.charts", distributions(told, step), Toolyard.tally("Finish reasons", summary.finishes, "finish", step),
      Toolyard.tally("Tool verdicts", summary.verdicts, "verdict", step));
  };

  const charts = (columns, edges) => {
    const mean = (name, of) => ({ name, of, weight: "count" });
    const failing = columns.some(({ rows }) => rows.some((row) => row.failed));
    return el("div.charts",
      failing ? Toolyard.lines("Failed requests", columns,
        [{ name: "failed", of: "failed_share", weight: "count", hue: "hue-bad", format: Toolyard.percent }]) : null,
      Toolyard.lines("Score: mean, min and max", columns,
        [{ name: "mean", of: "mean_score", weight: "scored" }], ["min_score", "max_score"]),
      Toolyard.heat("Score distribution", edges, columns),
      Toolyard.shares("Finish reasons", columns, "finishes", "finish"),
      Toolyard.shares("Tool verdicts", columns, "verdicts", "verdict"),
      Toolyard.lines("Mean turns and tool calls per request", columns,
        [mean("turns", "mean_turns"), mean("tool calls", "mean_tools")]),
      Toolyard.lines("Mean response tokens", columns, [mean("tokens", "mean_response_tokens")]),
      Toolyard.lines("Mean request time", columns, [mean("seconds", "mean_seconds")]));
  };

  // How many failed, as a link to them.
  const failures = (failed, query) => {
    if (!failed) return null;
    const q = /\sor\s/i.test(query) ? query : `${query} failed:yes`.trim();
    return [", ", el("a.bad.mark", { href: Toolyard.address([], { q }) }, `${number(failed)} failed`)];
  };

  Toolyard.showCharts = async (view, query) => {
    const told = await Toolyard.ask("statistics", { q: query });
    const rows = told.steps.filter((one) => one.count).map((one) => ({ ...one, failed_share: one.failed / one.count }));
    if (!rows.length) {
      view.replaceChildren(el("p.muted", query ? "No matches" : "No trajectories yet"));
      return;
    }
    const columns = Toolyard.columns(rows);
    const [all, failed] = ["count", "failed"].map((name) => rows.reduce((total, one) => total + one[name], 0));
    const notes = [
      query ? "Only trajectories that match the filter." : null,
      told.part ? `Covers all ${number(told.part.of)} trajectories; this report contains ${number(told.part.shown)} of them.` : null,
      columns.length < rows.length ? "Charts combine adjacent steps; the table below lists every step." : null];
    view.replaceChildren(el("div",
      el("h2", `${count(rows.length, "step")}, ${count(all, "trajectory", "trajectories")}`, failures(failed, query)),
      notes.filter(Boolean).map((note) => el("p.muted", note)),
      told.distributions ? oneStep(rows[0], told.distributions) : charts(columns, told.edges),
      el("h3", "All steps"), table(told.steps, query)));
  };

  // One step ---------------------------------------------------------------------------------------------------------

  const where = (timeline, summary, query, several) => {
    const all = Toolyard.inOrder(timeline.by_stage), critical = Toolyard.inOrder(timeline.critical_by_stage);
    const whole = all.reduce((total, [, sum]) => total + sum, 0);
    const left = summary.count - timeline.requests;
    const others = left > 0 ? ` (${number(left)} others were faster or have no timings)` : "";
    const address = (one) => Toolyard.address(["t", one.key], { tab: "timeline", q: query });
    const link = (one) => el("a", { href: address(one), title: one.request_id }, one.request_id || one.key);
    const waterfall = timeline.waterfall.length ? Toolyard.waterfall(timeline, link) : null;
    const starts = waterfall ? null : el("p.muted", several ? "Several runs: bars start at 0. Choose one run to see its wall clock."
      : "This dump has no start times; bars start at 0.");
    const rows = timeline.slowest.map((one) => el("tr",
      el("td", link(one)), el("td.right", seconds(one.seconds)), el("td.wide", Toolyard.timeline(one, timeline.slowest[0].seconds))));
    return el("section", el("h3", "Where the time went"), el("p.verdict", timeline.verdict),
      el("h4", `Total: ${seconds(whole)} in ${count(timeline.requests, "request")}${others}`),
      Toolyard.stacked(all), Toolyard.stageLegend(all),
      el("h4", "Critical path: the step waited for ", link(timeline.critical)),
      Toolyard.timeline(timeline.critical), Toolyard.scale(timeline.critical.seconds), Toolyard.stageLegend(critical),
      waterfall, rows.length > 1 ? [el("h4", rows.length < timeline.requests ? `Slowest ${rows.length} requests` : "All requests, slowest first"),
        starts, el("table.slowest", el("tbody", rows))] : null);
  };

  // If several runs have this step, link to each of them.
  const runs = (step, names, query) => {
    if (names.length < 2) return null;
    const links = names.map((name, at) => {
      const href = Toolyard.address(["step", step], { q: Toolyard.narrowed(query, `run=${Toolyard.quoted(name)}`) });
      return [at ? ", " : "", el("a", { href }, name || "top folder")];
    });
    return el("p.muted", `${count(names.length, "run")} combined; show only `, links);
  };

  Toolyard.showStep = async (view, step, query) => {
    const told = await Toolyard.ask("step", { step, q: query });
    const { summary, timeline } = told;
    const range = summary.scored ? ` (min ${number(summary.min_score)}, max ${number(summary.max_score)})` : "";
    const damaged = summary.damaged ? `, ${number(summary.damaged)} damaged` : "";
    const counted = count(summary.count, "trajectory", "trajectories");
    view.replaceChildren(el("div",
      el("h2", `Step ${step}`),
      el("p", counted, failures(summary.failed, `${query} step:${step}`.trim()),
        `, mean score ${number(summary.mean_score)}${range}${damaged} · `, el("a", { href: Toolyard.listed(`step:${step}`) }, "list them")),
      told.unfiltered ? el("p.muted", "All trajectories of this step: the filter does not apply here.") : null,
      told.unfiltered ? null : runs(step, told.runs, query),
      timeline ? where(timeline, summary, query, told.runs.length > 1) : el("p.muted", "No timings in this dump"),
      oneStep(summary, told.distributions)));
  };
})();
