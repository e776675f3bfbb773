"use strict";
// A trajectory as a conversation: bubbles, calls next to their results, reasoning folded.
(() => {
  const { Toolyard } = window;
  const { el, number, seconds, count } = Toolyard;
  const MANY = 5;
  const MANY_TURNS = 3; // more have an outline

  // Parts of the conversation that can be hidden; the address names the hidden ones.
  Toolyard.PARTS = [["prompt", "earlier prompt messages"], ["reasoning", "reasoning"], ["calls", "tool calls"],
    ["results", "tool results"], ["timings", "timings and metrics"]];

  const ended = (call) => (call.outcome !== "ok" ? call.outcome : call.verdict || "ok");
  // A failed call is an infrastructure failure; the verdict "failed" is the program's.
  const kindOf = (call) => (call.outcome === "failed" ? "bad" : Toolyard.kind(ended(call)));
  const badge = (call) => (ended(call) ? Toolyard.badge(ended(call), kindOf(call)) : null);

  const piece = (one, hidden) => {
    if (one.kind === "code") return Toolyard.code(one.text, one.language);
    if (one.kind !== "reasoning") return Toolyard.prose(one.text);
    if (hidden.has("reasoning")) return null;
    const summary = `reasoning, ${count(one.text.length, "character")}`;
    return el("details.reasoning", el("summary", summary), Toolyard.prose(one.text));
  };

  const pictures = (all) => all.map((one) => el("figure.picture",
    el("img", { src: one.url, alt: one.label, loading: "lazy" }), el("figcaption.muted", one.label)));

  const asked = (one) => el("div.asked",
    one.code !== null ? Toolyard.code(one.code, one.language) : null,
    one.arguments ? Toolyard.code(one.arguments, "json") : null,
    one.code === null && !one.arguments ? el("span.muted", "(no arguments)") : null);
  const answered = (one, hidden) => {
    const measured = Object.keys(one.metrics).length && !hidden.has("timings");
    return el("div.answered",
      el("div.bar", el("span.muted", "result"), one.response ? Toolyard.copyButton(one.response) : null),
      Toolyard.output(one.response),
      pictures(one.images),
      one.error ? Toolyard.output(one.error, `error.${kindOf(one)}`) : null,
      measured ? el("details", el("summary", "metrics"), Toolyard.json(one.metrics)) : null);
  };
  const call = (one, hidden) => {
    const times = hidden.has("timings") ? [] : [
      one.wait_seconds ? `waited ${seconds(one.wait_seconds)}` : null,
      one.seconds ? `ran ${seconds(Math.max(one.seconds - one.wait_seconds, 0))}` : null];
    const facts = [one.reward !== null ? `step reward ${number(one.reward)}` : null, ...times].filter(Boolean).join(" · ");
    const name = el("span.name", el("strong", one.name || "unreadable call"), " ", badge(one));
    return el("div.call", el("div.bar", name, el("span.muted", facts)),
      el(hidden.has("results") ? "div" : "div.beside", asked(one), hidden.has("results") ? null : answered(one, hidden)));
  };
  const calls = (all, hidden) => {
    if (hidden.has("calls") || !all.length) return null;
    const ends = new Map();
    for (const one of all) ends.set(ended(one), (ends.get(ended(one)) || 0) + 1);
    const told = [...ends].map(([name, times]) => `${number(times)} ${name || "unknown"}`).join(", ");
    const shown = all.map((one) => call(one, hidden));
    return all.length > MANY ? el("div.many", el("p.muted", `${count(all.length, "call")}: ${told}`), shown) : shown;
  };

  const bubble = (one, { plain, hidden }) => {
    const { generating } = one.timings;
    const head = el("div.bar",
      el("span.name", el("strong.role", one.role), one.name ? ` ${one.name}` : null,
        one.turn === null ? null : el("span.muted", ` turn ${one.turn + 1}`)),
      el("span.muted", generating && !hidden.has("timings") ? `sampled in ${seconds(generating)}` : ""));
    const body = plain && one.raw !== null ? [Toolyard.output(one.raw, "raw")]
      : [one.pieces.map((part) => piece(part, hidden)), calls(one.calls, hidden), pictures(one.images)];
    const nothing = !one.pieces.length && !one.calls.length && !one.images.length;
    return el(`article.bubble.role-${one.role}`, { data: one.turn === null ? {} : { turn: one.turn } }, head, body, nothing ? el("span.muted", "(empty)") : null);
  };

  // Jumps to a turn, and shows what became of its calls.
  const outline = (turns, nodes) => el("nav.outline", { "aria-label": "Turns" }, turns.map((one, at) => {
    const told = one.calls.map((call) => `${call.name}: ${ended(call) || "unknown"}`).join("\n");
    const go = () => nodes[at].scrollIntoView({ block: "start" });
    return el("button", { type: "button", onclick: go, data: { to: one.turn + 1 }, title: told || "no calls" }, `turn ${one.turn + 1}`,
      one.calls.slice(0, MANY).map((call) => el(`span.mark.${kindOf(call)}`, { "aria-label": ended(call) || "unknown" })),
      one.calls.length > MANY ? el("span.muted", `+${number(one.calls.length - MANY)}`) : null);
  }));

  // Scrolls to the next or previous turn.
  Toolyard.nextTurn = (direction) => {
    const nodes = [...document.querySelectorAll("#view .bubble[data-turn]")];
    const { top: edge } = document.getElementById("view").getBoundingClientRect();
    const top = (node) => node.getBoundingClientRect().top - edge - parseFloat(getComputedStyle(node).scrollMarginTop);
    const next = direction > 0 ? nodes.find((node) => top(node) > 2) : nodes.findLast((node) => top(node) < -2);
    next?.scrollIntoView({ block: "start" });
  };

  // `plain`: show sampled messages as they were sampled, including call syntax. `hidden`: parts to leave out.
  Toolyard.conversation = (detail, looks) => {
    const first = detail.bubbles.findIndex((one) => one.turn !== null);
    const prompt = detail.bubbles.slice(0, first < 0 ? detail.bubbles.length : first);
    const earlier = looks.hidden.has("prompt") ? [] : prompt.slice(0, -1);
    const rest = detail.bubbles.slice(prompt.length);
    const nodes = rest.map((one) => bubble(one, looks));
    const turns = rest.map((one, at) => [one, nodes[at]]).filter(([one]) => one.turn !== null);
    const long = turns.length > MANY_TURNS;
    const body = el("div.conversation",
      earlier.length ? el("details.prompt", { open: earlier.length < 3 },
        el("summary", count(earlier.length, "earlier prompt message")),
        earlier.map((one) => bubble(one, looks))) : null,
      prompt.slice(-1).map((one) => bubble(one, looks)), nodes,
      detail.bubbles.length ? null : el("p.muted", "No messages"));
    return long ? el("div.outlined", outline(turns.map(([one]) => one), turns.map(([, node]) => node)), body) : body;
  };
})();
