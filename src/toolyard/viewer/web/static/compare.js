"use strict";
// Two trajectories side by side: by turn, or by token.
(() => {
  const { Toolyard } = window;
  const { el, count } = Toolyard;
  const AROUND = 3;
  const SHORT = 12;
  const IDS = 16; // tokens per line, if their text is unknown

  // Shows only rows near a difference, with a button for the others.
  const folded = (rows) => {
    const near = new Set();
    rows.forEach((row, at) => {
      if (!row.same) for (let one = at - AROUND; one <= at + AROUND; one += 1) near.add(one);
    });
    const skipped = (left) => {
      const show = () => line.replaceWith(...left.map((one) => one.draw()));
      const button = el("button.small", { type: "button", onclick: show }, `show ${count(left.length, "equal line")}`);
      const line = el("tr.skipped", el("td", { colspan: 2 }, button));
      return line;
    };
    const body = el("tbody");
    for (let at = 0; at < rows.length;) {
      let end = at;
      while (end < rows.length && !near.has(end)) end += 1;
      const fold = end - at > 1 && rows.length > SHORT;
      body.append(fold ? skipped(rows.slice(at, end)) : rows[at].draw());
      at = fold ? end : at + 1;
    }
    return el("table.diff", body);
  };
  // A section of both trajectories; if nothing differs, it is folded and drawn when opened.
  const section = (name, rows) => {
    if (!rows.every((row) => row.same)) return el("section", el("h3", name), folded(rows));
    const fold = el("details", el("summary", "show"));
    fold.addEventListener("toggle", () => fold.children.length === 1 && fold.append(folded(rows)));
    return el("section", el("h3", `${name} `, el("span.badge.good", "same")), rows.length ? fold : null);
  };

  // By turn: lines of text -------------------------------------------------------------------------------------------

  // Two lines with everything between their common start and end marked.
  const apart = (left, right) => {
    const most = Math.min(left.length, right.length);
    let from = 0;
    while (from < most && left[from] === right[from]) from += 1;
    let tail = 0;
    while (tail < most - from && left[left.length - 1 - tail] === right[right.length - 1 - tail]) tail += 1;
    return [left, right].map((line) =>
      [line.slice(0, from), el("ins", line.slice(from, line.length - tail)), line.slice(line.length - tail)]);
  };
  // Without colors of the terminal, unless they are all that differs.
  const bare = (left, right) => {
    const plain = [left, right].map((text) => Toolyard.withoutAnsi(text ?? ""));
    return plain[0] === plain[1] && left !== right ? [left, right] : plain;
  };
  const lines = (all) => all.map((line) => ({ same: line.kind === "same", draw: () => {
    const plain = bare(line.left, line.right);
    const [left, right] = line.kind === "changed" ? apart(...plain) : plain;
    return el(`tr.d-${line.kind}`, el("td", left), el("td", right));
  } }));
  const byTurn = ({ comparison }) => el("div",
    section("Prompt", lines(comparison.prompt)),
    comparison.turns.map((turn) => section(`Turn ${turn.turn + 1}`, lines(turn.lines))));

  // By token ---------------------------------------------------------------------------------------------------------

  // The tokens of two runs in lines of `{left: [places], right: [places], same}`. A line ends where both sides have a
  // newline or, if their text is unknown, after IDS tokens.
  const tokenLines = (left, right, equal) => {
    const found = [{ left: [], right: [], same: true }];
    let one = 0, other = 0;
    for (const [at, to, length] of [...equal, [left?.ids.length ?? 0, right?.ids.length ?? 0, 0]]) {
      const now = found.at(-1);
      if (at > one || to > other) now.same = false;
      for (; one < at; one += 1) now.left.push(one);
      for (; other < to; other += 1) now.right.push(other);
      for (let step = 0; step < length; step += 1, one += 1, other += 1) {
        found.at(-1).left.push(one);
        found.at(-1).right.push(other);
        const ends = left.texts ? left.texts[one].includes("\n") : found.at(-1).left.length >= IDS;
        if (ends) found.push({ left: [], right: [], same: true });
      }
    }
    return found.filter((line) => line.left.length || line.right.length);
  };

  // `partner`: maps a place to the equal token on the other side. `first`: index of the first difference in all tokens.
  const flow = (run, side, places, partner, first) => places.map((at) => {
    const node = Toolyard.token(run, at, { side, at, run: run.index, partner: partner.get(at) ?? "" });
    node.classList.toggle("differs", !partner.has(at));
    node.classList.toggle("first", run.start + at === first);
    return node;
  });

  const pair = ([left, right], equal, first) => {
    const run = left || right;
    const [toRight, toLeft] = [new Map(), new Map()];
    for (const [at, to, length] of equal) {
      for (let step = 0; step < length; step += 1) {
        toRight.set(at + step, to + step);
        toLeft.set(to + step, at + step);
      }
    }
    const draw = (line) => el(line.same ? "tr" : "tr.d-tokens",
      el("td", flow(left, 0, line.left, toRight, first)), el("td", flow(right, 1, line.right, toLeft, first)));
    const rows = tokenLines(left, right, equal).map((line) => ({ same: line.same, draw: () => draw(line) }));
    const origin = run.origin === "tool" ? "not sampled (masked)" : run.origin;
    return section(run.turn === null ? "Prompt" : `Turn ${run.turn + 1}, ${origin}`, rows);
  };

  const byToken = async (told) => {
    if (!told.runs.length) return el("p.muted", "One of them has no tokens in this dump: compare by turn.");
    const sides = await Promise.all([told.left, told.right].map((row) => Toolyard.ask("tokens", { key: row.key })));
    for (const side of sides) side.runs.forEach((run, index) => { run.index = index; });
    const note = el("div.token-note", { role: "status" }, "Hover over a token to see both sides.");
    const body = el("div.tokens", told.runs.map(([one, other, equal]) =>
      pair([sides[0].runs[one], sides[1].runs[other]], equal, told.comparison.divergence?.token)));
    let marked = null;
    body.addEventListener("mouseover", (event) => {
      const node = event.target.closest(".t");
      if (!node) return;
      marked?.classList.remove("partner");
      const { at, run, partner } = node.dataset;
      const side = Number(node.dataset.side), across = 1 - side;
      const acrossRun = told.runs.find((two) => two[side] === Number(run))[across];
      const names = ["left", "right"];
      const lines = [`${names[side]}: ${Toolyard.tellToken(sides[side].runs[run], Number(at))}`];
      if (partner !== "") lines.push(`${names[across]}: ${Toolyard.tellToken(sides[across].runs[acrossRun], Number(partner))}`);
      note.textContent = Toolyard.visible(lines.join("\n"));
      marked = body.querySelector(`.t[data-side="${across}"][data-run="${acrossRun}"][data-at="${partner}"]`);
      marked?.classList.add("partner");
    });
    return el("div", Toolyard.tokenLegend(sides.every((side) => side.tokenizer)), note, body);
  };

  // Both -------------------------------------------------------------------------------------------------------------

  const callout = ({ divergence: parts }) => {
    if (!parts) return el("div.divergence.same", "All tokens are the same.");
    const origin = parts.origin === "tool" ? "not sampled" : parts.origin;
    const where = `${origin}${parts.turn === null ? "" : `, turn ${parts.turn + 1}`}`;
    const title = parts.token === null ? "First difference" : `First difference: token ${Toolyard.number(parts.token)}`;
    return el("div.divergence", { id: "divergence" },
      el("div.bar", el("span", el("strong", title), ` (${where})`),
        el("button.small", { type: "button", id: "to-difference", title: "Go there (d)" }, "go there")),
      el("p", parts.explanation), el("div.pair", bare(parts.left, parts.right).map((said) => el("pre", said))));
  };
  const facts = (all) => {
    const side = (name, at) => el("tr", el("th", name),
      all.map((fact) => el(fact[1] === fact[2] ? "td" : "td.differs", fact[at])));
    return el("div.scroll.side-facts", el("table", el("thead", el("tr", el("th", ""), all.map(([fact]) => el("th", fact)))),
      el("tbody", side("left", 1), side("right", 2))));
  };
  const name = (row, q) => el("div", el("a", { href: Toolyard.address(["t", row.key], { q }) }, row.request_id || row.key),
    el("span.muted", ` ${row.file}, line ${row.line} · step ${row.step} · sample ${row.sample}`));

  Toolyard.showComparison = async (view, left, right, options) => {
    const told = await Toolyard.ask("compare", { left, right });
    const by = options.by === "token" ? "token" : "turn";
    const tab = (one) => el("a", {
      href: Toolyard.address(["compare", left, right], { ...options, by: one === "turn" ? "" : one }),
      role: "tab", "aria-selected": String(one === by), "aria-controls": "tab-body", data: { by: one } }, `by ${one}`);
    const drawn = await (by === "token" ? byToken(told) : byTurn(told));
    const body = el("div.tab-body", { role: "tabpanel", id: "tab-body" }, drawn);
    body.querySelector("tr:is(.d-changed, .d-left, .d-right)")?.classList.add("first");
    view.replaceChildren(
      el("div.detail-head", el("h2", "Side by side"), callout(told.comparison), facts(told.comparison.facts)),
      el("div.tab-bar", el("div.tabs", { role: "tablist" }, tab("turn"), tab("token")),
        Toolyard.exported ? null : el("a.swap", { href: Toolyard.address(["compare", right, left], options) }, "swap sides")),
      el("div.pair.names", name(told.left, options.q), name(told.right, options.q)), body);
    const show = () => body.querySelector(".first")?.scrollIntoView({ block: "center" });
    view.querySelector("#to-difference")?.addEventListener("click", show);
  };
})();
