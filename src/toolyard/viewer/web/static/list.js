"use strict";
// The list on the left. Only visible pages of rows are fetched and drawn, so it can have any length.
(() => {
  const { Toolyard } = window;
  const { el, number, seconds, count } = Toolyard;
  const PAGE = 100;
  const ROW = 54; // height in pixels, the same as in style.css
  const MOST = 500000; // maximum rows to scroll through: browsers limit the height of elements
  const SORTS = ["", "score", "-score", "-length", "length", "-turns", "-tools", "-time", "time", "step", "-step"];

  class List {
    // `onQuery(text)`: the user chose another order. `onTrouble(error)`: rows could not be fetched.
    constructor(root, { onQuery, onTrouble }) {
      Object.assign(this, { root, onQuery, onTrouble, query: null, count: 0, current: null, at: null, version: 0 });
      this.pages = new Map(); // by number: {node, rows}
      this.head = el("div.list-head");
      this.body = el("div.rows", { role: "listbox", "aria-label": "Trajectories" });
      this.note = el("p.more.muted");
      root.append(this.head, this.body, this.note);
      root.addEventListener("scroll", () => this.draw());
      new ResizeObserver(() => this.draw()).observe(root);
      this.body.addEventListener("click", (event) => this.clicked(event));
    }

    // Shows the rows of `query`, scrolled to the row `key`. False if another call has replaced it meanwhile.
    async show(query, key) {
      const version = (this.version += 1);
      const [told, at] = await Promise.all([this.ask(query, 0), key ? this.locate(query, key) : null]);
      if (version !== this.version) return false;
      this.query = query;
      this.pages.clear();
      this.body.replaceChildren();
      this.counted(told);
      this.put(0, told.rows);
      this.select(key, at);
      this.draw();
      return true;
    }

    // The dump has changed: fetch the visible rows again, without scrolling.
    async refresh() {
      const version = (this.version += 1);
      const pages = this.count ? this.seen() : [0];
      const here = this.current ? this.locate(this.query, this.current) : null;
      const [at, ...told] = await Promise.all([here, ...pages.map((page) => this.ask(this.query, page))]);
      if (version !== this.version) return;
      for (const page of this.pages.keys()) if (!pages.includes(page)) this.drop(page);
      this.counted(told[0]);
      told.forEach((one, index) => this.put(pages[index], one.rows));
      this.select(this.current, at, false);
      this.draw();
    }

    ask(query, page) { return Toolyard.ask("rows", { q: query, offset: page * PAGE, limit: PAGE }); }

    async locate(query, key) {
      try {
        return (await Toolyard.ask("position", { q: query, key })).position;
      } catch (error) {
        if (error instanceof Toolyard.Refusal) return null; // the row does not exist, or no longer
        throw error;
      }
    }

    seen() {
      const last = Math.ceil(Math.min(this.count, MOST) / PAGE) - 1;
      const page = (pixels) => Math.min(Math.max(Math.floor((pixels - this.body.offsetTop) / (ROW * PAGE)), 0), last);
      const [from, to] = [page(this.root.scrollTop), page(this.root.scrollTop + this.root.clientHeight)];
      return last < 0 ? [] : Array.from({ length: to - from + 1 }, (_, index) => from + index);
    }

    draw() {
      const seen = this.seen();
      for (const page of this.pages.keys()) if (!seen.some((one) => Math.abs(one - page) < 2)) this.drop(page);
      for (const page of seen) if (!this.pages.has(page)) this.fetch(page);
    }

    async fetch(page) {
      const { version } = this;
      this.put(page, []);
      try {
        const told = await this.ask(this.query, page);
        if (version === this.version && this.pages.has(page)) this.put(page, told.rows);
      } catch (error) {
        this.drop(page);
        this.onTrouble(error);
      }
    }

    drop(page) {
      this.pages.get(page)?.node.remove();
      this.pages.delete(page);
    }

    put(page, rows) {
      const known = this.pages.get(page);
      const node = known?.node || el("div.page", { role: "presentation", style: { top: `${page * PAGE * ROW}px` } });
      const focused = node.contains(document.activeElement) ? document.activeElement.dataset.key : null;
      node.replaceChildren(...rows.map((row, index) => this.item(row, page * PAGE + index)));
      if (!known) this.body.append(node);
      this.pages.set(page, { node, rows });
      if (focused !== null) this.node(focused)?.focus({ preventScroll: true });
    }

    counted({ count: all, failed }) {
      this.count = all;
      this.body.style.height = `${Math.min(all, MOST) * ROW}px`;
      const told = el("div", { role: "status" }, el("strong", number(all)), all === 1 ? " trajectory" : " trajectories",
        failed ? el("div", this.failures(failed)) : null);
      this.head.replaceChildren(told, this.sorts());
      this.note.textContent = all === 0 ? (this.query ? "No matches" : "No trajectories yet")
        : all > MOST ? `First ${number(MOST)} only; use the filter to narrow them down.` : "";
    }

    // How many failed, and the way to them.
    failures(failed) {
      const said = `${number(failed)} failed`;
      if (/(^|\s)(or|failed:\w+)(\s|$)/i.test(this.query)) return el("span.bad.mark", said);
      const show = () => this.onQuery(`${this.query} failed:yes`.trim());
      return el("button.link.bad.mark", { type: "button", id: "failed", title: "Show only these", onclick: show }, said);
    }

    sorts() {
      const now = /(?:^|\s)sort:(-?\w+)/i.exec(this.query)?.[1] ?? "";
      const names = SORTS.includes(now) ? SORTS : [...SORTS, now];
      const told = (name) => (name ? `${name.replace("-", "")} ${name[0] === "-" ? "↓" : "↑"}` : "file order");
      const select = el("select", { "aria-label": "Sort by", id: "sort" },
        names.map((name) => el("option", { value: name, selected: name === now }, told(name))));
      select.addEventListener("change", () => {
        const rest = this.query.replace(/(?:^|\s)sort:\S+/gi, "").trim();
        this.onQuery(select.value ? `${rest} sort:${select.value}`.trim() : rest);
      });
      return select;
    }

    item(row, index) {
      const chosen = row.key === this.current;
      const looks = ["row", chosen ? "chosen" : "", row.damaged || Toolyard.failed(row) ? "failed" : ""];
      const lines = row.damaged ? this.damaged(row) : this.told(row);
      return el("a.row", {
        href: Toolyard.address(["t", row.key], { q: this.query }), class: looks.join(" "), data: { key: row.key },
        role: "option", "aria-selected": String(chosen), "aria-posinset": index + 1, "aria-setsize": this.count,
        tabindex: chosen ? 0 : -1 }, lines);
    }

    told(row) {
      const run = row.file.includes("/") ? `${row.file.slice(0, row.file.lastIndexOf("/"))} · ` : "";
      const kind = Toolyard.kind(row.finish);
      const reason = Toolyard.withoutAnsi([row.finish, row.failure].filter(Boolean).join(": "));
      const facts = [
        row.turns === null ? null : count(row.turns, "turn"),
        row.tools === null ? null : `${count(row.tools, "call")}${row.failed_tools ? ` (${number(row.failed_tools)} !)` : ""}`,
        row.response_tokens === null ? count(row.chars, "character") : count(row.response_tokens, "token")];
      const time = row.seconds === null ? null : el("span.time.muted", seconds(row.seconds));
      const noted = row.noted ? el("span.noted", { title: "has a note" }, "✎") : null;
      const step = el("span.step.muted", { title: row.file }, `${run}step ${row.step}`);
      if (Toolyard.failed(row)) return [
        el("span.score.bad.mark", { title: "failed" }),
        el("div.line", el("span.reason.bad", { title: `${reason}\n${row.preview}` }, reason), noted, el("div.aside", time, step))];
      const ordinary = kind === "good" || row.finish === "unknown";
      return [
        el(`span.score.${Toolyard.scoreClass(row.score)}`, { title: `score ${number(row.score, 6)}` }, number(row.score)),
        el("div.line", ordinary ? null : el(`span.finish.mark.${kind}`, { title: row.finish }, row.finish),
          el("span.preview", { title: row.preview }, row.preview || "(no text)"), noted, time),
        el("div.line", el("span.facts.muted", { title: row.failed_tools ? `${count(row.failed_tools, "call")} failed` : "" },
          facts.filter(Boolean).join(" · ")), step)];
    }

    damaged(row) {
      return [el("span.score.bad.mark", { title: "damaged" }),
        el("div.line", el("span.preview.damaged", { title: row.damaged }, row.damaged), el("span.step.muted", "damaged")),
        el("div.line", el("span.facts.muted", `line ${number(row.line)} of ${row.file}`))];
    }

    node(key) { return this.body.querySelector(`[data-key="${CSS.escape(key)}"]`); }

    // `at`: its position; null if it does not match the filter.
    select(key, at, scroll = true) {
      const focused = this.body.contains(document.activeElement);
      for (const node of this.body.querySelectorAll(".chosen")) this.choose(node, false);
      this.current = key ?? null;
      this.at = at;
      if (at !== null && scroll) this.scrollTo(at);
      const node = key ? this.node(key) : null;
      if (node) this.choose(node, true);
      const first = this.body.querySelector(".row");
      if (first && first !== node) first.tabIndex = at === null ? 0 : -1; // keeps the list reachable by keyboard
      if (node && focused) node.focus({ preventScroll: true });
    }

    choose(node, chosen) {
      node.classList.toggle("chosen", chosen);
      node.setAttribute("aria-selected", chosen);
      node.tabIndex = chosen ? 0 : -1;
    }

    scrollTo(at) {
      const top = this.body.offsetTop + at * ROW, head = this.head.offsetHeight;
      if (top - head < this.root.scrollTop) this.root.scrollTop = top - head;
      else this.root.scrollTop = Math.max(this.root.scrollTop, top + ROW - this.root.clientHeight);
    }

    // Selects the trajectory `key`, which is now shown.
    async choice(key) {
      if (key === this.current) return;
      for (const [page, { rows }] of this.pages) {
        const index = rows.findIndex((row) => row.key === key);
        if (index >= 0) { this.select(key, page * PAGE + index); return; }
      }
      const { version } = this;
      this.current = key;
      const at = key ? await this.locate(this.query, key) : null;
      if (version !== this.version || key !== this.current) return;
      this.select(key, at);
      this.draw();
    }

    async rowAt(at) {
      const page = Math.floor(at / PAGE);
      const rows = this.pages.get(page)?.rows;
      return rows?.length ? rows[at % PAGE] : (await this.ask(this.query, page)).rows[at % PAGE];
    }

    async open(at) {
      if (!this.count) return;
      const row = await this.rowAt(Math.min(Math.max(at, 0), this.count - 1));
      if (row) this.go(row.key);
    }

    move(step) { return this.open(this.at === null ? 0 : this.at + step); }

    go(key) { location.hash = Toolyard.address(["t", key], { ...Toolyard.kept(Toolyard.place().options), q: this.query }); }

    clicked(event) {
      const row = event.target.closest(".row");
      if (!row || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
      event.preventDefault();
      this.go(row.dataset.key);
    }
  }
  Toolyard.List = List;
})();
