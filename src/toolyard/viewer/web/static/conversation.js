"use strict";
// A trajectory as a conversation: bubbles, calls next to their results, reasoning folded.
(() => {
  const { Toolyard } = window;
  const { el, number, seconds, count } = Toolyard;
  const MANY = 5;

  // Parts of the conversation that can be hidden; the address names the hidden ones.
  Toolyard.PARTS = [["prompt", "earlier prompt messages"], ["reasoning", "reasoning"], ["calls", "tool calls"],
    ["results", "tool results"], ["timings", "timings and metrics"]];

  const ended = (call) => (call.outcome !== "ok" ? call.outcome : call.verdict || "ok");
  const KINDS = new Map([["ok", "good"], ["unknown", "none"], ["not answered", "none"], ["", "none"]]);
  const badge = (said) => (said ? el(`span.badge.${KINDS.get(said) || "bad"}`, said) : null);

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
      one.error ? Toolyard.output(one.error, "error") : null,
      measured ? el("details", el("summary", "metrics"), Toolyard.json(one.metrics)) : null);
  };
  const call = (one, hidden) => {
    const times = hidden.has("timings") ? [] : [
      one.wait_seconds ? `waited ${seconds(one.wait_seconds)}` : null,
      one.seconds ? `ran ${seconds(Math.max(one.seconds - one.wait_seconds, 0))}` : null];
    const facts = [one.reward !== null ? `step reward ${number(one.reward)}` : null, ...times].filter(Boolean).join(" · ");
    const name = el("span.name", el("strong", one.name || "unreadable call"), " ", badge(ended(one)));
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

  const failure = ({ whose, stage, error }) => el("article.bubble.failure",
    el("strong.name", `${whose === "ours" ? "Infrastructure" : "Task"} failure while ${stage}`),
    Toolyard.output(error, "error"));

  // `plain`: show sampled messages as they were sampled, including call syntax. `hidden`: parts to leave out.
  Toolyard.conversation = (detail, looks) => {
    const first = detail.bubbles.findIndex((one) => one.turn !== null);
    const prompt = detail.bubbles.slice(0, first < 0 ? detail.bubbles.length : first);
    const earlier = looks.hidden.has("prompt") ? [] : prompt.slice(0, -1);
    return el("div.conversation",
      earlier.length ? el("details.prompt", { open: earlier.length < 3 },
        el("summary", count(earlier.length, "earlier prompt message")),
        earlier.map((one) => bubble(one, looks))) : null,
      [...prompt.slice(-1), ...detail.bubbles.slice(prompt.length)].map((one) => bubble(one, looks)),
      detail.bubbles.length ? null : el("p.muted", "No messages"),
      detail.failure ? failure(detail.failure) : null);
  };
})();
