"use strict";
// Keyboard shortcuts, the same as in the terminal, and the dialogs they open.
(() => {
  const { Toolyard } = window;
  const { el } = Toolyard;
  const HELP = [
    ["n / p", "next / previous trajectory"],
    ["N / P", "next / previous step"],
    ["j / k", "scroll down / up"],
    ["g / G", "first / last trajectory"],
    ["/", "filter"],
    ["s", "search; Enter goes to the next match, also in other trajectories"],
    ["] / [", "next / previous match"],
    ["o", "sort"],
    ["f", "choose the parts of the conversation to show"],
    ["r", "show messages as sampled, or as a conversation"],
    ["x", "unfold or fold everything"],
    ["1 … 5", "conversation, tokens, timeline, rewards, raw"],
    [". / ,", "next / previous turn"],
    ["u / U", "tokens: the least likely, then the next least likely / back"],
    ["t", "timeline"],
    ["d", "compare with another sample; in a comparison, go to the first difference"],
    ["y", "copy the request id"],
    ["i", "jump to a request id"],
    ["m", "write a note"],
    ["v", "saved views"],
    ["c", "steps and charts"],
    ["T", "light or dark"],
    ["esc", "leave a field, clear the search, go back"],
    ["?", "this help"],
  ];
  const FILTERS = [
    ["score<0.5 tools>2", "conditions; all must hold"],
    ["score:0.2..0.8  step:10..12", "ranges"],
    ["score:none", "trajectories without a score"],
    ["finish:length  verdict:timed_out", "text contains; use = for equals"],
    ["tool:search call_time>2", "tool, verdict, error and call_time must match the same call"],
    ['"two words"  text:220000', "text in any message"],
    ["-state:FAILED  score!=1", "negation"],
    ["score=0 or finish:length", "either condition"],
    ["damaged:yes", "lines that cannot be read"],
    ["sort:-time", "sort order; - for descending"],
  ];
  const FIELDS = "Fields: score tools failed_calls turns length prompt chars time started step line sample group reward.NAME finish state "
    + "source task truth id file run tool verdict error call_time failed damaged text. length is in response tokens, time in seconds. "
    + "In the filter, ↓ lists the fields, Tab takes one, and the values of a field are suggested as you type.";

  const byId = (id) => document.getElementById(id);
  const table = (rows) => el("table", el("tbody",
    rows.map(([key, what]) => el("tr", el("th", el("kbd", key)), el("td", what)))));

  const help = () => {
    const dialog = byId("keys");
    dialog.append(
      el("form.bar", { method: "dialog" }, el("h2", { id: "keys-title" }, "Keys"), el("button", "close")), table(HELP),
      el("h2", "Filter"), table(FILTERS), el("p.muted", FIELDS));
  };
  const jumping = () => {
    const dialog = byId("jump");
    const field = el("input", { id: "jump-id", autocomplete: "off", spellcheck: "false", "aria-label": "Request id" });
    const problem = el("p.damaged", { role: "alert" });
    const go = async () => {
      const { rows } = await Toolyard.ask("find", { id: field.value.trim() });
      if (!rows.length) { problem.textContent = "Matches no request id, or several."; return; }
      dialog.close();
      // If several runs have it, list them all.
      const q = rows.length > 1 ? `id:${rows[0].request_id}` : "";
      location.hash = Toolyard.address(["t", rows[0].key], { q });
    };
    dialog.append(el("form", { onsubmit: (event) => { event.preventDefault(); if (field.value.trim()) go(); } },
      el("h2", { id: "jump-title" }, "Go to a request"), el("p", "Request id, or its start:"), field, problem,
      el("button", "go"), " ", el("button", { type: "button", onclick: () => dialog.close() }, "cancel")));
    return () => { problem.textContent = ""; dialog.showModal(); field.select(); };
  };

  // `theme()` toggles light and dark.
  Toolyard.keys = ({ list, theme }) => {
    const view = byId("view");
    help();
    const jump = jumping();
    const tab = (at) => view.querySelectorAll(".tabs a")[at]?.click();
    const step = async (backwards) => {
      const here = (await list.rowAt(list.at ?? 0))?.step;
      if (here === undefined) return;
      const told = await Toolyard.ask("next_step", { step: here, q: list.query, backwards: backwards ? 1 : null });
      if (told.row) list.go(told.row.key);
    };
    const up = () => {
      const { parts, options } = Toolyard.place();
      if (options.find) Toolyard.change({ find: "" });
      else if (parts[0] === "compare") location.hash = Toolyard.address(["t", parts[1]], { q: options.q });
      else if (parts[0] === "step") location.hash = Toolyard.address(["charts"], { q: options.q });
      else if (parts.length) location.hash = Toolyard.address([], { q: options.q });
    };
    const fold = () => Toolyard.change({ unfold: Toolyard.place().options.unfold ? "" : "1", open: "" });
    const parts = () => {
      const menu = byId("parts");
      if (menu) { menu.open = true; menu.querySelector("input").focus(); }
    };
    const focus = (field) => { field?.focus(); field?.select?.(); };
    const actions = new Map(Object.entries({
      n: () => list.move(1), p: () => list.move(-1), N: () => step(false), P: () => step(true),
      j: () => view.scrollBy(0, 120), k: () => view.scrollBy(0, -120),
      g: () => list.open(0), G: () => list.open(list.count - 1),
      "/": () => focus(byId("query")), s: () => focus(byId("find")),
      "]": () => Toolyard.nextMatch(1), "[": () => Toolyard.nextMatch(-1),
      o: () => byId("sort")?.focus(), f: parts, r: () => byId("plain")?.click(), x: fold, t: () => tab(2),
      1: () => tab(0), 2: () => tab(1), 3: () => tab(2), 4: () => tab(3), 5: () => tab(4),
      d: () => (byId("to-difference") ? byId("to-difference").click() : byId("compare")?.focus()),
      u: () => byId("likelier-next")?.click(), U: () => byId("likelier-before")?.click(),
      ".": () => Toolyard.nextTurn(1), ",": () => Toolyard.nextTurn(-1),
      y: () => byId("copy-id")?.click(), i: jump, m: Toolyard.writeNote, v: Toolyard.openViews, T: theme, "?": () => byId("keys").showModal(), Escape: up,
      c: () => { location.hash = Toolyard.address(["charts"], { q: list.query }); },
    }));
    const inList = new Map([["ArrowDown", "n"], ["ArrowUp", "p"], ["Home", "g"], ["End", "G"]]);
    const inField = (event) => {
      const menu = event.target.closest(".menu[open]");
      if (event.key !== "Escape") return;
      event.preventDefault(); // Escape would also empty the field
      if (menu) { menu.open = false; menu.querySelector("summary").focus(); } else event.target.blur();
    };
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing || document.querySelector("dialog[open]")) return;
      if (event.target.closest("input, select, textarea, .menu[open]")) { inField(event); return; }
      const key = (event.target.closest("#list .rows") && inList.get(event.key)) || event.key;
      const action = actions.get(key);
      if (!action) return;
      event.preventDefault();
      action();
    });
    document.addEventListener("click", (event) => {
      for (const menu of document.querySelectorAll(".menu[open]")) if (!menu.contains(event.target)) menu.open = false;
    });
    byId("help").addEventListener("click", actions.get("?"));
  };
})();
