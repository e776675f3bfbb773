"use strict";
// What became of each task between two steps, or two runs.
(() => {
  const { Toolyard } = window;
  const { el, number, count } = Toolyard;
  const KINDS = ["broken", "worse", "solved", "better", "same", "new", "gone"];
  const SAID = { solved: "no full score before, at least one now", broken: "a full score before, none now",
    better: "the mean rose", worse: "the mean fell", same: "the same mean", new: "no scores before", gone: "no scores now" };

  const signed = (value) => (value === null ? "–" : `${value > 0 ? "▲ +" : value < 0 ? "▼ −" : ""}${number(Math.abs(value))}`);
  const direction = (value) => (value > 0 ? "good" : value < 0 ? "fell" : "none");
  const said = (side) => side.replace(/^(step|run)[:=]/, "$1 ");
  const ofRun = (run) => `run=${Toolyard.quoted(run)}`;

  // The conditions of both sides: as in the address, or the first and last step or run.
  const sides = ({ steps, runs }, { before, after }) => {
    const all = steps.length > 1 ? steps.map(({ step }) => `step:${step}`) : runs.map(ofRun);
    return [before || all[0], after || all.at(-1)];
  };
  const choice = (name, chosen, { steps, runs }) => {
    const option = (value, said) => el("option", { value, selected: value === chosen }, said);
    const known = new Set([...steps.map(({ step }) => `step:${step}`), ...runs.map(ofRun)]);
    return el("label", `${name} `, el("select", { name, onchange: ({ target }) => Toolyard.change({ [name]: target.value, page: "" }) },
      known.has(chosen) ? null : option(chosen, chosen),
      el("optgroup", { label: "steps" }, steps.map(({ step }) => option(`step:${step}`, `step ${step}`))),
      runs.length > 1 ? el("optgroup", { label: "runs" }, runs.map((run) => option(ofRun(run), `run ${run || "(top folder)"}`))) : null));
  };

  const answer = (told, before, after) => {
    const { kinds } = told;
    if (!told.tasks) return "No task has scores on both sides.";
    return `Mean score ${number(told.before)} → ${number(told.after)} over ${count(told.tasks, "task")}: `
      + `${number(kinds.solved || 0)} solved, ${number(kinds.broken || 0)} broken from ${said(before)} to ${said(after)}.`;
  };

  const row = (one, [before, after], q) => {
    const list = (side) => Toolyard.address([], { q: Toolyard.narrowed(q, side, `group:${one.group_id}`) });
    const mean = (side, value, samples) => el("td.right", samples ? el("a", {
      href: list(side), title: `List ${count(samples, "trajectory", "trajectories")}` }, number(value)) : "–");
    return el("tr", el("td", el("span.kind", { data: { kind: one.kind }, title: SAID[one.kind] }, one.kind)),
      el(`td.right.${direction(one.change)}`, signed(one.change)),
      mean(before, one.before, one.count_before), mean(after, one.after, one.count_after),
      el("td.right", `${number(one.count_before)} → ${number(one.count_after)}`),
      Toolyard.taskCell(one));
  };
  const NAMES = ["change", "before", "after", "samples"];

  Toolyard.showChanges = async (view, options) => {
    const { q = "", kind = "", page = "" } = options;
    const overview = await Toolyard.ask("overview", {});
    const [before, after] = sides(overview, options);
    if (!options.before && !options.after && overview.steps.length < 2 && overview.runs.length < 2) {
      view.replaceChildren(el("h2", "Compare steps"), el("p.muted", overview.steps.length
        ? "This dump has only one step. To compare two runs, open the folder that contains both: toolyard view FOLDER --web"
        : "No trajectories yet"));
      return;
    }
    const asked = { before: Toolyard.narrowed(q, before), after: Toolyard.narrowed(q, after) };
    const told = await Toolyard.ask("changes_between", { ...asked, kind, offset: Toolyard.offset(page), limit: Toolyard.PAGE });
    const head = el("thead", el("tr", el("th", ""), NAMES.map((name) => el("th.right", name)), el("th", "task")));
    view.replaceChildren(el("div.changes", el("h2", "Compare steps"),
      el("div.bar", el("div.sides", choice("before", before, overview), choice("after", after, overview),
        el("a", { href: Toolyard.address(["changes"], { ...options, before: after, after: before, page: "" }) }, "swap"))),
      overview.steps.length < 2 ? el("p.muted", "This dump has only one step, so these are its runs.") : null,
      el("p.verdict", answer(told, before, after)),
      Toolyard.covers(q, told.part),
      Toolyard.chips(KINDS, told.kinds, kind),
      told.changes.length ? el("table.wide-table", head, el("tbody", told.changes.map((one) => row(one, [before, after], q)))) : el("p.muted", "None"),
      Toolyard.pages(told.count, page)));
  };
})();
