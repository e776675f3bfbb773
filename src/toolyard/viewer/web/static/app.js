"use strict";
// Routing: shows what the address says. Keys change the address; changes on the server refresh the view.
(() => {
  const { Toolyard } = window;
  const { el } = Toolyard;
  const WIDE = 900; // below this width, list and view are shown one at a time; the same as in style.css
  const LONGEST = 30000; // maximum milliseconds between attempts to reach the server
  const BREATH = 3; // after a refresh, pause this many times as long as it took
  const COUNTS = ["charts", "step", "groups", "calls", "changes"]; // views of everything that the filter finds
  const NOTHING_FOUND = "No matches";
  const NOTHING_YET = "No trajectories yet. They appear here as they are written.";
  const byId = (id) => document.getElementById(id);
  const view = byId("view"), query = byId("query"), problem = byId("query-error"), away = byId("away");
  let routed = 0;
  let busy = ""; // what is being loaded
  let shown = ""; // the address of the current view
  let asked = null; // the list's filter, or the one being loaded

  // Theme: the user's choice, or the system's.
  const remembered = () => { try { return localStorage.getItem("toolyard-theme"); } catch { return null; } };
  const setTheme = (name) => { document.documentElement.dataset.theme = name; };
  const theme = () => {
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    try { localStorage.setItem("toolyard-theme", document.documentElement.dataset.theme); } catch { /* only for now */ }
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(remembered() || (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", () => remembered() || setTheme(dark.matches ? "dark" : "light"));

  const setQuery = (text) => {
    const { parts, options } = Toolyard.place();
    const staying = parts[0] === "t" || COUNTS.includes(parts[0]);
    location.hash = Toolyard.address(staying ? parts : [], { ...options, page: "", q: text });
  };
  const trouble = (error) => {
    if (error instanceof Toolyard.Away) lost();
    else problem.textContent = Toolyard.visible(error.message);
    if (!(error instanceof Toolyard.Refusal)) console.error(error);
  };
  const list = new Toolyard.List(byId("list"), { onQuery: setQuery, onTrouble: trouble });

  // Routing ----------------------------------------------------------------------------------------------------------

  const build = async (holder, { parts, options }) => {
    const [kind, first, second] = parts;
    const key = kind === "t" ? first : kind === undefined && innerWidth > WIDE && list.count ? (await list.rowAt(0)).key : null;
    if (key) await Toolyard.showDetail(holder, key, options);
    else if (kind === "compare") await Toolyard.showComparison(holder, first, second, options);
    else if (kind === "charts") await Toolyard.showCharts(holder, options.q || "");
    else if (kind === "groups") await Toolyard.showGroups(holder, options);
    else if (kind === "calls") await Toolyard.showCalls(holder, options);
    else if (kind === "changes") await Toolyard.showChanges(holder, options);
    else if (kind === "step") await Toolyard.showStep(holder, first, options.q || "");
    else holder.append(el("p.muted", list.count ? "Choose a trajectory." : asked ? NOTHING_FOUND : NOTHING_YET));
    return key;
  };

  const navigation = (kind, q) => {
    document.body.dataset.view = kind || "list";
    for (const link of document.querySelectorAll("nav a")) {
      const here = link.dataset.view === (kind === "step" ? "charts" : COUNTS.includes(kind) ? kind : "list");
      link.classList.toggle("here", here);
      if (here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
      link.href = Toolyard.address(link.dataset.view === "list" ? [] : [link.dataset.view], { q });
    }
  };

  const showList = async (q, key) => {
    if (q !== asked) query.value = q; // otherwise the user may be typing the next one
    asked = q;
    problem.textContent = "";
    try {
      if (q === list.query) await list.choice(key);
      else await list.show(q, key);
    } catch (error) {
      trouble(error);
    }
  };

  // Keeps the focus and an open menu.
  const replace = (holder) => {
    const focused = view.contains(document.activeElement) ? document.activeElement : null;
    const { id = "", name = "" } = focused || {};
    const menu = focused?.closest(".menu[open]");
    view.replaceChildren(holder);
    if (!focused || focused === view) return;
    if (menu && byId(menu.id)) byId(menu.id).open = true;
    const same = id ? byId(id) : name ? view.querySelector(`[name="${CSS.escape(name)}"]`) : null;
    (same || view).focus({ preventScroll: true });
  };

  // What is shown no longer belongs to the address: says so until the new view is there.
  const loading = (place, what) => {
    const q = place.options.q || "";
    const filtered = !["t", "compare"].includes(place.parts[0]); // the filter is part of what these views show
    const next = filtered ? `${what} ${q}` : what;
    if (next !== busy) view.setAttribute("aria-busy", "true");
    if (q !== list.query) byId("list").setAttribute("aria-busy", "true");
    busy = next;
  };

  const route = async () => {
    const mine = (routed += 1);
    const place = Toolyard.place();
    const what = JSON.stringify([place.parts, place.options.tab, place.options.by, place.options.page]);
    navigation(place.parts[0], place.options.q);
    loading(place, what);
    await showList(place.options.q || "", place.parts[0] === "t" ? place.parts[1] : null);
    if (mine !== routed) return;
    const holder = el("div.holder");
    let key = null;
    try {
      key = await build(holder, place);
    } catch (error) {
      holder.replaceChildren(el("p.damaged", error.message));
      if (!(error instanceof Toolyard.Refusal)) console.error(error);
      if (error instanceof Toolyard.Away) lost();
    }
    if (mine !== routed) return;
    const top = what === shown ? view.scrollTop : 0; // the same view with other options keeps its scroll position
    shown = what;
    replace(holder);
    for (const part of [view, byId("list")]) part.removeAttribute("aria-busy");
    view.dataset.key = key ?? "";
    view.scrollTop = top;
    if (key) await list.choice(key).catch(trouble);
    if (place.options.turn) view.querySelector(`[data-turn="${CSS.escape(place.options.turn)}"]`)?.scrollIntoView();
    if (place.options.find) Toolyard.searchShown();
    document.body.dataset.ready = String(mine);
  };

  // Following --------------------------------------------------------------------------------------------------------

  let revision = 0, generation = 0, wait = 0, wake = () => {};
  const lost = () => {
    away.textContent = "Server unreachable. Reconnecting…";
    away.hidden = false;
  };
  const pause = (milliseconds) => new Promise((resolve) => { wake = resolve; setTimeout(resolve, milliseconds); });

  const changed = async (told, back) => {
    const replaced = told.generation !== generation;
    ({ revision, generation } = told);
    await list.refresh();
    const { parts } = Toolyard.place();
    const counts = COUNTS.includes(parts[0]) || (!parts.length && !view.dataset.key);
    if (back || replaced || counts) await route();
  };
  // A hidden page does not poll: browsers limit connections per server, over all windows.
  const follow = async () => {
    for (;;) {
      if (document.hidden) await pause(LONGEST * 10);
      const stop = new AbortController();
      const leave = () => document.hidden && stop.abort();
      document.addEventListener("visibilitychange", leave);
      try {
        const told = await Toolyard.ask("changes", { revision }, stop.signal);
        const back = !away.hidden;
        away.hidden = true;
        wait = 0;
        if (told.changed || back) {
          const began = performance.now();
          await changed(told, back);
          await pause(BREATH * Math.max(performance.now() - began, 100)); // a dump may grow continuously
        }
      } catch {
        if (!document.hidden) {
          lost();
          wait = Math.min(Math.max(2 * wait, 1000), LONGEST);
          await pause(wait);
        }
      } finally {
        document.removeEventListener("visibilitychange", leave);
      }
    }
  };

  const start = async () => {
    const overview = await Toolyard.ask("overview", {});
    ({ revision, generation } = overview);
    document.title = `${overview.folder_name} · Toolyard`;
    byId("title").textContent = byId("title").title = Toolyard.visible(overview.title);
    byId("theme").addEventListener("click", theme);
    byId("skip").addEventListener("click", () => view.focus());
    byId("filter").addEventListener("submit", (event) => {
      event.preventDefault();
      setQuery(query.value.trim());
      query.blur();
    });
    query.addEventListener("search", () => query.value || setQuery("")); // its cross was clicked
    addEventListener("hashchange", route);
    Toolyard.suggest(query);
    Toolyard.keys({ list, theme });
    Toolyard.savedViews(overview.notes, setQuery);
    await route();
    if (Toolyard.exported) return;
    for (const name of ["visibilitychange", "focus", "online"]) addEventListener(name, () => document.hidden || wake());
    follow();
  };
  start().catch((error) => {
    view.replaceChildren(el("p.damaged", `This page cannot start: ${error.message}`));
    throw error;
  });
})();
