"use strict";
// Tokens, colored by origin and probability. Hover over one, or use the arrow keys, for details.
(() => {
  const { Toolyard } = window;
  const { el, number, count } = Toolyard;
  const CHUNK = 1000; // tokens drawn at once, when they scroll into view
  const DOUBT = 4; // a logprob of -4 has the strongest color

  const isLogprob = (value) => typeof value === "number";
  const textOf = (run, from = 0, to = run.ids.length) => (run.texts || run.ids.map((id) => `${id} `)).slice(from, to).join("");
  const nameOf = (run) => `${run.origin === "tool" ? "not sampled" : run.origin}${run.turn === null ? "" : `, turn ${run.turn + 1}`}`;

  Toolyard.tellToken = (run, at) => {
    const logprob = run.logprobs?.[at];
    const told = [`token ${number(run.start + at)}`, `id ${run.ids[at]}`, nameOf(run)];
    if (isLogprob(logprob)) told.push(`logprob ${number(logprob, 4)} (${Toolyard.percent(Math.exp(logprob))})`);
    if (run.texts) told.push(JSON.stringify(run.texts[at]));
    return told.join(" · ");
  };
  Toolyard.token = (run, at, data) => {
    const logprob = run.logprobs?.[at];
    const node = el(`span.t.o-${run.origin}`, { data }, run.texts ? run.texts[at] || "·" : `${run.ids[at]} `);
    if (isLogprob(logprob)) node.style.setProperty("--doubt", Math.min(Math.max(-logprob / DOUBT, 0), 1).toFixed(2));
    return node;
  };
  const ORIGINS = [["prompt", "prompt"], ["sampled", "sampled"], ["tool", "not sampled (masked)"]];
  Toolyard.tokenLegend = (tokenizer) => el("div.legend",
    ORIGINS.map(([origin, name]) => el("span", el(`i.o-${origin}`), name)),
    el("span", el("i.low"), "low probability"),
    tokenizer ? null : el("span", "token ids only; use --tokenizer MODEL to show text"));

  const head = (run) => {
    const known = (run.logprobs || []).filter(isLogprob);
    const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
    const likely = mean === null ? "" : ` · mean logprob ${number(mean)}`;
    return el("h4.run-head", `${nameOf(run)} · ${count(run.ids.length, "token")}${likely}`);
  };

  // A part of a run, drawn when it scrolls near; search uses `has` and `fill`.
  const stretch = (run, index, from) => {
    const to = Math.min(from + CHUNK, run.ids.length);
    const node = el("span.late", { data: { run: index, from } });
    node.has = (pattern) => textOf(run, from, to).search(pattern) >= 0;
    node.fill = () => {
      if (!node.classList.replace("late", "drawn")) return;
      node.style.height = "";
      for (let at = from; at < to; at += 1) node.append(Toolyard.token(run, at, { run: index, at }));
    };
    if (to - from < CHUNK && from === 0) node.fill();
    else node.style.height = `${Math.ceil((to - from) / 14) * 22}px`;
    return node;
  };

  const drawn = (told, observer) => told.runs.map((run, index) => {
    const body = el("div.run-body.block");
    const show = () => {
      for (let from = 0; from < run.ids.length; from += CHUNK) body.append(stretch(run, index, from));
      for (const late of body.querySelectorAll(".late")) observer.observe(late);
    };
    if (run.origin !== "prompt") {
      show();
      return el("section.run", head(run), body);
    }
    const fold = el("details.long", { ontoggle: () => fold.open && fold.fill(), data: { run: index } },
      el("summary", "show the prompt"), body);
    fold.fill = () => body.childNodes.length || show();
    fold.has = (pattern) => textOf(run).search(pattern) >= 0;
    return el("section.run", head(run), fold);
  });

  // Moves from token to token: arrow keys across runs, and `next(1)` to the next less likely sampled one.
  const moving = (body, told, tell) => {
    let here = null;
    const at = (run, token) => {
      const fits = told.runs[run] && token >= 0 && token < told.runs[run].ids.length;
      if (!fits) return null;
      const fold = body.querySelector(`details[data-run="${run}"]`);
      if (fold) { fold.fill(); fold.open = true; }
      body.querySelector(`.late[data-run="${run}"][data-from="${token - (token % CHUNK)}"]`)?.fill();
      return body.querySelector(`.t[data-run="${run}"][data-at="${token}"]`);
    };
    const choose = (node, why = "") => {
      here?.classList.remove("at");
      here = node;
      node.classList.add("at");
      tell(node, why);
    };
    body.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const first = Math.max(told.runs.findIndex((one) => one.origin !== "prompt"), 0);
      const [run, token] = here ? [Number(here.dataset.run), Number(here.dataset.at) + step] : [first, 0];
      const beyond = step > 0 ? [run + 1, 0] : [run - 1, (told.runs[run - 1]?.ids.length ?? 0) - 1];
      const next = at(run, token) || at(...beyond);
      if (next) { choose(next); next.scrollIntoView({ block: "nearest" }); }
    });
    body.addEventListener("click", (event) => event.target.closest(".t") && choose(event.target.closest(".t")));

    const ranked = told.runs.flatMap((run, index) => (run.logprobs || []).map((logprob, token) => [logprob, index, token]))
      .filter(([logprob]) => isLogprob(logprob)).sort((one, other) => one[0] - other[0]);
    let rank = -1;
    const go = (to) => {
      rank = Math.min(Math.max(to, 0), ranked.length - 1);
      const [, run, token] = ranked[rank];
      const node = at(run, token);
      choose(node, `${rank ? `less likely: ${number(rank + 1)}` : "least likely"} of ${number(ranked.length)} · `);
      node.scrollIntoView({ block: "center" });
    };
    return ranked.length ? { first: () => go(0), next: (step) => go(rank + step) } : null;
  };
  const button = (id, name, title, onclick) => el("button.small", { type: "button", id, title, onclick }, name);
  const jumps = (move) => el("span.jumps", "least likely token: ",
    button("least-likely", "go there", "The least likely sampled token (u)", move.first), " ",
    button("likelier-before", "previous", "Back (U)", () => move.next(-1)), " ",
    button("likelier-next", "next", "The next least likely (u)", () => move.next(1)));

  Toolyard.tokens = async (detail) => {
    if (!detail.has_tokens) return el("p.muted", "No tokens in this dump: it has only text.");
    const told = await Toolyard.ask("tokens", { key: detail.key });
    const note = el("div.token-note", { role: "status" }, "Hover over a token, or use the arrow keys.");
    const tell = ({ dataset }, why = "") => {
      note.textContent = Toolyard.visible(why + Toolyard.tellToken(told.runs[dataset.run], Number(dataset.at)));
    };
    const observer = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); entry.target.fill(); }
    }, { root: document.getElementById("view"), rootMargin: "1500px" });
    const body = el("div.tokens", { tabindex: 0, role: "group", "aria-label": "Tokens" }, drawn(told, observer));
    body.addEventListener("mouseover", (event) => event.target.closest(".t") && tell(event.target.closest(".t")));
    const move = moving(body, told, tell);
    return el("div", el("div.bar", Toolyard.tokenLegend(told.tokenizer), move ? jumps(move) : null), note, body,
      told.left_out ? el("p.muted", `${count(told.left_out, "more token")} not shown`) : null);
  };
})();
