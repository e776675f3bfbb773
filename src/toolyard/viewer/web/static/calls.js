"use strict";
// Tool calls: which fail and why, and which are slow.
(() => {
  const { Toolyard } = window;
  const { el, number, seconds, count } = Toolyard;

  const calls = (...conditions) => {
    const { q = "" } = Toolyard.place().options;
    return Toolyard.address(["calls"], { q: Toolyard.narrowed(q, ...conditions) });
  };
  const equals = (field, value) => `${field}=${Toolyard.quoted(value)}`;
  const share = (part, all) => (all ? Toolyard.percent(part / all) : "–");
  const total = (tools, name) => tools.reduce((sum, tool) => sum + tool[name], 0);

  const answer = ({ tools, errors }) => {
    const all = total(tools, "calls"), failed = total(tools, "failed");
    if (!failed) return `All ${count(all, "call")} succeeded.`;
    const [most] = errors;
    return `${number(failed)} of ${count(all, "call")} failed (${share(failed, all)}), most often ${most.tool}: ${most.error} (${number(most.calls)}).`;
  };

  const verdicts = (tool) => {
    const parts = Object.entries(tool.verdicts);
    const told = (verdict, times) => `${verdict}: ${count(times, "call")}, ${share(times, tool.calls)}`;
    return [
      el("div.verdict-bar", { "aria-hidden": "true" }, parts.map(([verdict, times]) =>
        el("i", { class: `paint ${Toolyard.hue(verdict)}`, title: told(verdict, times), style: { flexGrow: times } }))),
      el("div.verdict-names", parts.map(([verdict, times]) => el("a", {
        href: calls(equals("tool", tool.tool), equals("verdict", verdict)), title: told(verdict, times) },
      el("i", { class: `swatch paint ${Toolyard.hue(verdict)}` }), `${verdict} ${number(times)}`)))];
  };
  const NAMES = ["calls", "failed", "success", "p50", "p95", "max", "wait p50", "wait p95"];
  const byTool = (tools) => {
    const row = (tool) => el("tr",
      el("td.name", el("a", { href: calls(equals("tool", tool.tool)) }, tool.tool || "(no name)")),
      el("td.right", number(tool.calls)), el("td.right", number(tool.failed)),
      el("td.right", share(tool.calls - tool.failed, tool.calls)),
      [tool.p50, tool.p95, tool.longest, tool.wait_p50, tool.wait_p95].map((time) => el("td.right", seconds(time))),
      el("td", verdicts(tool)));
    return el("table.tools", el("thead", el("tr", el("th", "tool"), NAMES.map((name) => el("th.right", name)), el("th", "verdicts"))),
      el("tbody", tools.map(row)));
  };

  // Opens an example at its error, with the list of all trajectories that have it.
  const example = (one, q) => {
    const only = one.error === one.verdict ? equals("verdict", one.verdict) : equals("error", one.error);
    const find = one.error === one.verdict ? "" : one.error.replace(/…$/, "");
    return Toolyard.address(["t", one.key], { q: Toolyard.narrowed(q, equals("tool", one.tool), only), find, turn: one.turn });
  };
  const errors = (all, q) => el("section", el("h3", "Errors, by their last line"),
    all.length ? el("table.errors", el("thead", el("tr", el("th.right", "calls"), el("th", "tool"), el("th", "last line"))),
      el("tbody", all.map((one) => el("tr", el("td.right", number(one.calls)), el("td.name", one.tool),
        el("td", one.key ? el("a.id", { href: example(one, q), title: "Open an example" }, one.error) : el("span.id", one.error))))))
      : el("p.muted", "None"));

  const slowest = (all, q) => {
    const row = (one) => el("tr",
      el("td.right", seconds(one.seconds)), el("td.right", seconds(one.wait)), el("td.name", one.tool), el("td", one.verdict),
      el("td.right", number(one.step)), el("td.right", one.turn + 1),
      el("td", one.key ? el("a.id", { href: Toolyard.address(["t", one.key], { q, turn: one.turn }) }, one.request_id || one.key) : "–"));
    const names = [["right", "time"], ["right", "waiting"], ["", "tool"], ["", "verdict"], ["right", "step"], ["right", "turn"], ["", "request"]];
    return el("section", el("h3", "Slowest calls"), all.length
      ? el("table.slow-calls", el("thead", el("tr", names.map(([kind, name]) => el(kind ? `th.${kind}` : "th", name)))), el("tbody", all.map(row)))
      : el("p.muted", "No timings in this dump"));
  };

  Toolyard.showCalls = async (view, { q = "" }) => {
    const told = await Toolyard.ask("calls", { q });
    if (!told.tools.length) {
      view.replaceChildren(el("h2", "Calls"), el("p.muted", q ? "No calls match the filter." : "No tool calls in this dump"));
      return;
    }
    view.replaceChildren(el("div.calls", el("h2", "Calls"), el("p.verdict", answer(told)),
      Toolyard.covers("", told.part),
      el("p.muted", q ? "Only calls that match the filter. Times include waiting · " : "Times include waiting · ",
        el("a", { href: Toolyard.address([], { q: q || "tools>0" }) }, "list their trajectories")),
      byTool(told.tools), errors(told.errors, q), slowest(told.slowest, q)));
  };
})();
