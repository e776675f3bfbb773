"use strict";
// What pages with long tables share: chips that choose a kind, columns to sort by, and pages. The address has the choices.
(() => {
  const { Toolyard } = window;
  const { el, number } = Toolyard;
  Toolyard.PAGE = 100;

  const here = (options) => {
    const place = Toolyard.place();
    return Toolyard.address(place.parts, { ...place.options, page: "", ...options });
  };
  const added = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);

  // `names`: the kinds in their order, `counts`: how many of each there are. Those that do not occur are left out.
  Toolyard.chips = (names, counts, chosen = "") => {
    const chip = (name, said, times) => el("a.chip", {
      href: here({ kind: name }), "aria-current": chosen === name ? "true" : null, data: { kind: said } },
    `${said} `, el("strong", number(times)));
    return el("div.chips", { role: "group", "aria-label": "Show" }, chip("", "all", added(counts)),
      names.filter((name) => counts[name] || name === chosen).map((name) => chip(name, name, counts[name] || 0)));
  };

  // The head of a column: the first click sorts descending, the second ascending, the third not at all.
  Toolyard.sortable = (name, title, sort = "") => {
    const next = sort === `-${name}` ? name : sort === name ? "" : `-${name}`;
    const order = sort === `-${name}` ? "descending" : sort === name ? "ascending" : null;
    const arrow = { descending: " ↓", ascending: " ↑" }[order] ?? "";
    return el("th.right", { "aria-sort": order, title }, el("a", { href: here({ sort: next }) }, `${name}${arrow}`));
  };

  // What a page covers. `part`: how many trajectories an exported report has of all.
  Toolyard.covers = (q, part) => [
    q ? el("p.muted", "Only trajectories that match the filter.") : null,
    part ? el("p.muted", `Covers the ${number(part.shown)} of ${number(part.of)} trajectories that this report contains.`) : null];

  // A task: its name (or how it begins), a note, the truth, and how it begins.
  Toolyard.taskCell = ({ task, preview, truth }, link, note = "") => {
    const name = task || preview || "(no text)";
    const told = [note, truth ? `truth: ${truth}` : null].filter(Boolean).join(" · ");
    return el("td.task", el("div.clip", { title: `${name} ${told}` }, link ? el("a", link, name) : name, el("span.muted", ` ${told}`)),
      task ? el("div.clip.muted", { title: preview }, preview) : null);
  };

  // `all`: how many rows there are on all pages. `page`: from 1, as in the address.
  Toolyard.offset = (page) => Math.max((Number.parseInt(page, 10) || 1) - 1, 0) * Toolyard.PAGE;
  Toolyard.pages = (all, page) => {
    const from = Toolyard.offset(page), to = Math.min(from + Toolyard.PAGE, all);
    if (!from && to >= all) return null;
    const at = from / Toolyard.PAGE + 1;
    const link = (said, goal, there) => (there ? el("a", { href: here({ page: goal === 1 ? "" : goal }) }, said) : el("span.muted", said));
    return el("nav.pages", { "aria-label": "Pages" }, link("‹ previous", at - 1, from > 0),
      el("span", from < all ? `${number(from + 1)} to ${number(to)} of ${number(all)}` : `only ${number(all)}`), link("next ›", at + 1, to < all));
  };
})();
