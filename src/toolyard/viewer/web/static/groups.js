"use strict";
// Groups: the samples of each task, and whether they differ.
(() => {
  const { Toolyard } = window;
  const { el, number, count } = Toolyard;
  const KINDS = ["mixed", "all 0", "all 1", "all equal", "unscored"];

  const answer = ({ kinds, largest }) => {
    const all = Object.values(kinds).reduce((a, b) => a + b, 0), mixed = kinds.mixed || 0;
    if (kinds.unscored === all) return "No group has scores.";
    if (largest === 1) return "Every task has one sample: GRPO needs several.";
    if (!mixed) return `None of ${count(all, "group")} is mixed: GRPO learns nothing from them.`;
    if (mixed === all) return all === 1 ? "The only group is mixed." : `All ${count(all, "group")} are mixed: each teaches GRPO something.`;
    return `${number(mixed)} of ${count(all, "group")} ${mixed === 1 ? "is mixed: only this one teaches" : "are mixed: only these teach"} GRPO anything.`;
  };

  const signed = (value) => (value === null ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${number(Math.abs(value), 2)}`);
  const kindOf = ({ failure, finish, score }) => {
    if (failure) return "failed";
    if (Toolyard.kind(finish) === "cut") return "cut";
    if (typeof score !== "number") return "none";
    return Toolyard.scoreClass(score) === "good" ? "full" : score === 0 ? "zero" : "part";
  };
  const cell = (one, q, advantages) => {
    const said = advantages ? signed(one.advantage) : number(one.score, 2);
    const kind = kindOf(one);
    const title = [`sample ${one.sample}: score ${number(one.score, 6)}`, `advantage ${signed(one.advantage)}`,
      one.failure ? `failed: ${one.failure}` : one.finish].join(", ");
    return el(`a.cell.${kind}`, { href: Toolyard.address(["t", one.key], { q }), title },
      kind === "failed" ? "×" : kind === "cut" ? `${said}…` : said);
  };

  const row = (group, q, several, advantages) => {
    const run = several ? [`run=${Toolyard.quoted(group.run)}`] : [];
    const list = Toolyard.listed(`group:${group.group_id}`, `step:${group.step}`, ...run);
    const where = [several ? group.run || "top folder" : null, `step ${group.step}`].filter(Boolean).join(" · ");
    return el("tr",
      el("td", el("span.kind", { data: { kind: group.kind } }, group.kind)),
      el("td.right", number(group.mean)), el("td.right", number(group.std)),
      el("td.right", group.failed ? el("span.bad", number(group.failed)) : "0"),
      el("td", el("div.cells", group.members.map((one) => cell(one, q, advantages)),
        group.size > group.members.length ? el("a", { href: list }, `and ${number(group.size - group.members.length)} more`) : null)),
      Toolyard.taskCell(group, { href: list, title: "List these trajectories" }, where));
  };

  const head = (sort) => el("thead", el("tr", el("th", "kind"),
    Toolyard.sortable("mean", "Mean score", sort), Toolyard.sortable("std", "Standard deviation of the scores (n − 1)", sort),
    Toolyard.sortable("failed", "Requests that ended for a reason unrelated to the model", sort),
    el("th", "samples"), el("th", "task")));
  const looks = (advantages) => el("div.bar",
    el("label.muted", el("input", { type: "checkbox", name: "advantages", checked: advantages,
      onchange: ({ target }) => Toolyard.change({ advantages: target.checked ? "1" : "" }) }), " show advantages: (score − mean) / std"),
    el("span.legend", el("span", el("i.cell.full"), "full score"), el("span", el("i.cell.part"), "other score"), el("span", el("i.cell.zero"), "0"),
      el("span", el("i.cell.cut", "…"), "cut off by a length limit"), el("span", el("i.cell.failed", "×"), "failed, not scored")));

  Toolyard.showGroups = async (view, options) => {
    const { q = "", kind = "", sort = "", page = "" } = options;
    const told = await Toolyard.ask("groups", { q, kind, sort, offset: Toolyard.offset(page), limit: Toolyard.PAGE });
    const some = Object.keys(told.kinds).length > 0;
    const advantages = options.advantages === "1";
    view.replaceChildren(el("div.groups", el("h2", "Groups"),
      el("p.verdict", some ? answer(told) : q ? "No matches" : "No trajectories yet"),
      Toolyard.covers(q, told.part),
      some ? [Toolyard.chips(KINDS, told.kinds, kind), looks(advantages),
        el("table.wide-table", head(sort), el("tbody", told.groups.map((one) => row(one, q, told.several_runs, advantages)))),
        Toolyard.pages(told.count, page)] : null));
  };
})();
