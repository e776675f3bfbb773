"use strict";
// Suggestions while the filter is typed: fields, and the values they have in the dump.
(() => {
  const { Toolyard } = window;
  const { el, number } = Toolyard;
  const WAIT = 80; // milliseconds without another key
  const VALUE = /(?:^|\s)-?([A-Za-z_]\w*)(?:!=|[:=])("(?:\\.|[^"\\])*|[^\s"]*)$/;
  const OPEN = /(?:^|\s)-?"(?:\\.|[^"\\])*$/; // within a text in quotes
  const NAME = /(?:^|\s)-?([A-Za-z_][\w.]*|)$/;

  // What is being written before the cursor: `{field, part, from}`; null if nothing can be suggested.
  const written = (before) => {
    const value = VALUE.exec(before);
    if (value) {
      const minus = value[1].toLowerCase() === "sort" && value[2].startsWith("-") ? 1 : 0;
      const part = value[2].slice(minus).replace(/^"/, "").replace(/\\(.)/g, "$1");
      return { field: value[1].toLowerCase(), part, from: before.length - value[2].length + minus };
    }
    const name = OPEN.test(before) ? null : NAME.exec(before);
    return name && { field: "", part: name[1], from: before.length - name[1].length };
  };

  Toolyard.suggest = (field) => {
    const list = el("ul", { id: "suggestions", role: "listbox", "aria-label": "Suggestions", hidden: true });
    field.after(list);
    for (const [name, value] of [["role", "combobox"], ["aria-autocomplete", "list"], ["aria-controls", "suggestions"],
      ["aria-expanded", "false"]]) field.setAttribute(name, value);
    let place = null, at = -1, asked = 0, timer = 0;

    const close = () => {
      clearTimeout(timer);
      asked += 1;
      at = -1;
      list.hidden = true;
      list.replaceChildren();
      field.setAttribute("aria-expanded", "false");
      field.removeAttribute("aria-activedescendant");
    };
    const choose = (next) => {
      list.children[at]?.setAttribute("aria-selected", "false");
      at = (next + list.children.length) % list.children.length;
      list.children[at].setAttribute("aria-selected", "true");
      list.children[at].scrollIntoView({ block: "nearest" });
      field.setAttribute("aria-activedescendant", list.children[at].id);
    };
    const open = async (everything) => {
      close();
      const mine = asked;
      const now = written(field.value.slice(0, field.selectionStart));
      if (!now || (!now.field && !now.part && !everything)) return;
      let values;
      try {
        ({ values } = await Toolyard.ask("suggestions", { field: now.field, part: now.part }));
      } catch { return; } // without suggestions the filter works as well
      const only = values.length === 1 && values[0][0] === field.value.slice(now.from, field.selectionStart);
      if (mine !== asked || !values.length || only || document.activeElement !== field) return;
      place = now;
      list.replaceChildren(...values.map(([text, note], index) => el("li", {
        id: `suggestion-${index}`, role: "option", "aria-selected": "false", data: { text } },
      el("span", text), el("span.muted", typeof note === "number" ? number(note) : note))));
      list.hidden = false;
      field.setAttribute("aria-expanded", "true");
    };
    const accept = (item) => {
      const { text } = item.dataset;
      const more = text.endsWith(":");
      const rest = field.value.slice(field.selectionStart).replace(/^\S+/, "");
      const start = `${field.value.slice(0, place.from)}${text}${place.field ? " " : ""}`;
      field.value = start + rest.trimStart();
      field.setSelectionRange(start.length, start.length);
      if (more) open(true);
      else close();
    };

    const keys = {
      ArrowDown: () => (list.hidden ? open(true) : choose(at + 1)),
      ArrowUp: () => !list.hidden && choose(at < 0 ? -1 : at - 1),
      Tab: () => accept(list.children[Math.max(at, 0)]),
      Enter: () => accept(list.children[at]),
      Escape: close,
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || !keys[event.key]) return;
      if (list.hidden && event.key !== "ArrowDown") return;
      if (event.key === "Enter" && at < 0) { close(); return; } // submits the filter
      event.preventDefault();
      event.stopPropagation();
      keys[event.key]();
    });
    field.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(open, WAIT);
    });
    field.addEventListener("blur", close);
    list.addEventListener("mousedown", (event) => event.preventDefault()); // keeps the focus in the field
    list.addEventListener("click", (event) => {
      const item = event.target.closest("li");
      if (item) accept(item);
    });
  };
})();
