"use strict";
// One trajectory: conversation, tokens, timeline, rewards, the line itself.
(() => {
  const { Toolyard } = window;
  const { el, number, seconds, count } = Toolyard;
  const TABS = ["conversation", "tokens", "timeline", "rewards", "raw"];
  const OTHERS = 200;
  const FOLDS = 50; // maximum number of open folds kept in the address

  // Header -----------------------------------------------------------------------------------------------------------

  const comparisons = (detail) => {
    const where = (one) => (detail.row.task ? "" : ` (${one.file}, line ${one.line})`);
    const others = [
      ...detail.group.map((one) => [one, `sample ${one.sample}, score ${number(one.score)}${where(one)}`]),
      ...detail.twins.map((one) => [one, `same request in ${one.file}, score ${number(one.score)}`]),
    ].filter(([one]) => Toolyard.comparable(detail.key, one.key));
    if (!others.length) return null;
    const chosen = ({ target }) => {
      const { q } = Toolyard.place().options;
      if (target.value) location.hash = Toolyard.address(["compare", detail.key, target.value], { q });
    };
    return el("label.muted.others", "compare with ", el("select.compare", { id: "compare", onchange: chosen },
      el("option", { value: "" }, `… (${number(others.length)})`),
      others.slice(0, OTHERS).map(([one, name]) => el("option", { value: one.key }, name))));
  };

  const exactness = (exact) => (exact
    ? el("span.badge.good", { title: "Every token is exactly what the model sampled and saw" }, "token-exact")
    : el("span.badge.cut", { title: "Tokens were re-created from text" }, "not token-exact"));
  const facts = (detail) => {
    const { row } = detail;
    const tokens = `${number(row.prompt_tokens)} + ${count(row.response_tokens, "token")}`;
    const told = [
      count(row.turns, "turn"), count(row.tools, "call"),
      detail.has_tokens ? `${tokens} (${number(row.sampled_tokens)} sampled)` : count(row.chars, "character"),
      seconds(row.seconds)];
    const score = row.score === null ? "no score" : `score ${number(row.score, 6)}`;
    const kind = Toolyard.failed(row) ? "bad" : Toolyard.kind(row.finish);
    return el("div.facts",
      Toolyard.badge(row.finish, kind, `finish reason: ${row.finish}`),
      el("span", el("span.muted", "score "),
        el(`span.score.large.${Toolyard.scoreClass(row.score)}`, { title: score }, number(row.score))),
      detail.has_tokens ? exactness(detail.token_exact) : null,
      el("span.muted", told.join(" · ")),
      comparisons(detail));
  };

  const reasons = ({ why }) => why.parts.length > 0 && el("div.why", el("code", why.formula),
    why.parts.filter((part) => part.sentence).map((part) => el("div.muted", `${part.name}: ${part.sentence}`)));

  // Why it failed: the first line of the error stands alone; the rest, a traceback, is below.
  const failure = ({ whose, stage, source, cause, error }) => {
    const said = error.trim() || cause || "no reason given";
    const first = said.split("\n", 1)[0];
    const what = `${whose === "ours" ? "Infrastructure" : "Task"} failure while ${stage}`;
    return el("div.failure", el("div.block", el("strong.bad.mark", `${what}: `), Toolyard.ansi(first)),
      source ? el("div.muted", `in ${source}`) : null,
      first === said ? null : Toolyard.output(said.slice(first.length + 1), "error"));
  };

  const head = (detail, options) => {
    const { row } = detail;
    const id = row.request_id || detail.key;
    const copy = Toolyard.copyButton(id);
    copy.id = "copy-id";
    return el("div.detail-head",
      el("div.name", el("code.id", id), " ", copy, el("span.muted", ` ${row.file}, line ${row.line} · `),
        el("a", { href: Toolyard.address(["step", row.step], { q: options.q }) }, `step ${row.step}`),
        row.task ? el("span.muted", ` · task ${row.task}, sample ${row.sample}`) : null),
      detail.failure ? failure(detail.failure) : null, facts(detail), reasons(detail));
  };

  // Tabs -------------------------------------------------------------------------------------------------------------

  const timeline = ({ timeline: line }) => {
    if (!line.segments.length) return el("p.muted", "No timings in this dump");
    const rows = line.segments.map((one) => el("tr",
      el("td", el(`i.swatch.stage-${one.stage}`), one.stage), el("td.right", one.turn === null ? "" : `${one.turn + 1}`),
      el("td.right", seconds(one.start)), el("td.right", seconds(one.end - one.start)), el("td.muted", one.label)));
    const names = [el("th", "stage"), el("th.right", "turn"), el("th.right", "start"), el("th.right", "duration"), el("th", "")];
    return el("div", Toolyard.timeline(line), Toolyard.scale(line.seconds), Toolyard.stageLegend(Toolyard.byStage(line)),
      line.estimated ? el("p.muted", "The dump has durations but no start times: stages are drawn one after the other.") : null,
      el("table", el("thead", el("tr", names)), el("tbody", rows)));
  };

  const rewards = (detail) => {
    const score = number(detail.score, 6);
    const said = (part) => ["reason", "extracted", "expected"].filter((key) => part[key])
      .map((key) => el("div", el("span.muted", `${key} `), part[key]));
    const value = (part) => (part.value === null ? el("span.badge.bad", "could not be computed") : number(part.value, 6));
    const made = detail.why.parts.map((part) => el("tr", el("td", part.name), el("td.right", value(part)),
      el("td.muted", `× ${number(part.weight, 6)}`), el("td", said(part))));
    const calls = detail.bubbles.flatMap((bubble) => bubble.calls.map((call) => ({ ...call, turn: bubble.turn })));
    const stepped = calls.filter((call) => call.reward !== null).map((call) => el("tr",
      el("td.muted", `step reward, turn ${call.turn === null ? "–" : call.turn + 1}, ${call.name}`),
      el("td.right", number(call.reward, 6))));
    const truth = detail.ground_truth;
    const more = [["Metrics", detail.metrics], ["Other fields of the line", detail.extra]];
    const whole = el("td.right", el(`span.score.${Toolyard.scoreClass(detail.score)}`, score));
    return el("div",
      el("table.rewards", el("tbody", el("tr", el("th", "score"), whole), made, stepped)),
      made.length || stepped.length ? null : el("p.muted", "The dump does not say how the score was computed."),
      el("h3", "Ground truth"), typeof truth === "string" ? Toolyard.output(truth) : Toolyard.json(truth),
      more.filter(([, value]) => Object.keys(value).length).map(([name, value]) => [el("h3", name), Toolyard.json(value)]));
  };

  const raw = async (detail) => {
    const where = `${detail.row.file}, line ${detail.row.line}, indented`;
    const { text, told = where } = await Toolyard.ask("raw", { key: detail.key });
    return el("div", el("div.bar", el("span.muted", told), Toolyard.copyButton(text)),
      Toolyard.output(Toolyard.indented(text), "raw"));
  };

  // The address keeps the folds that differ from the default.
  const rememberFolds = (body, options) => {
    const folds = [...body.querySelectorAll("details")];
    if (options.unfold) for (const fold of folds) fold.open = true;
    const usual = folds.map((fold) => fold.open);
    for (const index of (options.open || "").match(/\d+/g) || []) if (folds[index]) folds[index].open = !usual[index];
    body.addEventListener("toggle", () => {
      const changed = folds.flatMap((fold, index) => (fold.open === usual[index] ? [] : [index]));
      if (changed.length <= FOLDS && body.isConnected) Toolyard.change({ open: changed.join(",") }, { replace: true });
    }, true);
  };

  // Controls above the tabs ------------------------------------------------------------------------------------------

  const choices = (hidden) => {
    const names = Toolyard.PARTS.map(([part]) => part);
    const shown = names.length - hidden.size;
    const changed = ({ target }) => {
      const left = names.filter((one) => (one === target.name ? !target.checked : hidden.has(one)));
      Toolyard.change({ hide: left.join(","), open: "" });
    };
    return el("details.menu", { id: "parts" },
      el("summary", { title: "Choose what to show (f)" }, hidden.size ? `show ${shown} of ${names.length}…` : "show…"),
      el("div.menu-body", Toolyard.PARTS.map(([part, name]) => el("label",
        el("input", { type: "checkbox", name: part, checked: !hidden.has(part), onchange: changed }), ` ${name}`))));
  };
  const sampled = (plain) => el("label.muted", { title: "Show sampled messages as the model wrote them (r)" },
    el("input", { type: "checkbox", id: "plain", checked: plain,
      onchange: ({ target }) => Toolyard.change({ plain: target.checked ? "1" : "", open: "" }) }), " as sampled");
  const submitted = (event) => {
    event.preventDefault();
    Toolyard.nextMatch(1);
  };
  const search = (find) => el("form.find", { role: "search", onsubmit: submitted },
    el("input", { id: "find", type: "search", placeholder: "search (s)", value: find || "", "aria-label": "Search",
      autocomplete: "off", oninput: Toolyard.searchTyped }),
    el("span.muted", { id: "matches", role: "status" }));
  const tabs = (key, tab, options) => el("div.tabs", { role: "tablist", "aria-label": "Views of this trajectory" },
    TABS.map((name, index) => el("a", {
      href: Toolyard.address(["t", key], { ...Toolyard.kept(options), tab: name === "conversation" ? "" : name }),
      role: "tab", id: `tab-${name}`, "aria-selected": String(name === tab), "aria-controls": "tab-body",
      title: `${name} (${index + 1})`, data: { tab: name } }, name)));

  const damaged = (detail) => el("div",
    el("div.detail-head", el("h2", `Damaged: ${detail.row.file}, line ${detail.row.line}`), el("p.damaged", detail.damaged)),
    el("div.bar", el("span.muted", "raw line"), Toolyard.copyButton(detail.raw)), Toolyard.output(detail.raw, "raw"));

  Toolyard.showDetail = async (view, key, options) => {
    const detail = await Toolyard.ask("row", { key });
    if (detail.damaged !== undefined) {
      view.replaceChildren(damaged(detail));
      return;
    }
    const tab = TABS.includes(options.tab) ? options.tab : "conversation";
    const plain = options.plain === "1";
    const left = (options.hide || "").split(",");
    const hidden = new Set(Toolyard.PARTS.map(([part]) => part).filter((part) => left.includes(part)));
    const build = {
      conversation: () => Toolyard.conversation(detail, { plain, hidden }), tokens: () => Toolyard.tokens(detail),
      timeline: () => timeline(detail), rewards: () => rewards(detail), raw: () => raw(detail),
    };
    const body = el("div.tab-body", { role: "tabpanel", id: "tab-body", "aria-labelledby": `tab-${tab}` }, await build[tab]());
    view.replaceChildren(head(detail, options), Toolyard.note(detail) ?? "", el("div.tab-bar", tabs(key, tab, options),
      tab === "conversation" ? [sampled(plain), choices(hidden)] : null, search(options.find)), body);
    rememberFolds(body, options);
  };
})();
