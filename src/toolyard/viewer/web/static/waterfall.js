"use strict";
// The requests of a step by wall clock: when each began, and which one ended last.
(() => {
  const { Toolyard } = window;
  const { el, number, seconds, count } = Toolyard;
  const SHOWN = 24;

  const moved = (one, by) => ({ ...one, segments: one.segments.map((part) => ({ ...part, start: part.start + by, end: part.end + by })) });
  const clock = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
  const axis = (whole) => el("div.axis", { "aria-hidden": "true" },
    [0, 0.25, 0.5, 0.75, 1].map((share) => el("span", seconds(share * whole))));

  // `link(request)`: to its own timeline.
  Toolyard.waterfall = (timeline, link) => {
    const { started_at: first, seconds: whole, critical, waterfall: all } = timeline;
    const row = (one) => {
      const from = one.started_at - first, last = one.number === critical.number;
      const told = `from ${seconds(from)} to ${seconds(from + one.seconds)}`;
      return el(last ? "tr.critical" : "tr", el("td", link(one)),
        el("td.right", { title: told }, last ? el("strong", "ended last ") : null, seconds(one.seconds)),
        el("td.wide", { title: told }, Toolyard.timeline(moved(one, from), whole)));
    };
    const ended = (one) => one.started_at + one.seconds;
    const late = new Set([...all].sort((one, other) => ended(other) - ended(one)).slice(0, SHOWN));
    const body = el("tbody", all.filter((one) => late.has(one)).map(row));
    const rest = all.length - late.size;
    const more = el("button", { type: "button", onclick: () => {
      body.replaceChildren(...all.map(row));
      more.remove();
    } }, `show ${count(rest, "earlier request")}`);
    const which = late.size < timeline.requests ? `The ${number(late.size)} requests that ended last` : "All requests";
    return el("section.waterfall", el("h3", "Waterfall by wall clock"),
      el("p.muted", `${clock(first)} to ${clock(first + whole)}. ${which}, in the order in which they began.`),
      el("table.slowest", el("thead", el("tr", el("td"), el("td"), el("td.wide", axis(whole)))), body), rest ? more : null);
  };
})();
