"use strict";
// Notes on trajectories, and saved views: all that this page can write.
(() => {
  const { Toolyard } = window;
  const { el } = Toolyard;
  const drafts = new Map(); // unsaved texts, by the key of their trajectory
  let readOnly = ""; // why nothing can be written

  const attempt = async (status, work) => {
    try {
      status.textContent = Toolyard.visible(await work());
    } catch (error) {
      status.textContent = Toolyard.visible(error.message);
      if (!(error instanceof Toolyard.Refusal || error instanceof Toolyard.Away)) throw error;
    }
  };

  // Notes ------------------------------------------------------------------------------------------------------------

  Toolyard.note = ({ key, note }) => {
    if (readOnly) return note ? el("div.note", el("strong", "Note"), el("p", note)) : null;
    let was = note;
    const status = el("span.muted", { role: "status" });
    const field = el("textarea", { id: "note", rows: 3, "aria-label": "Note", placeholder: "Kept beside the dump" });
    field.value = drafts.get(key) ?? note;
    field.addEventListener("input", () => {
      if (field.value === was) drafts.delete(key);
      else drafts.set(key, field.value);
      status.textContent = field.value === was ? "" : "not saved";
    });
    const save = () => attempt(status, async () => {
      const text = field.value;
      const told = await Toolyard.tell("note", { key, text, was });
      was = told.note;
      drafts.delete(key);
      if (field.value === text) field.value = was;
      return was === text.trim() ? "saved" : "somebody else changed it meanwhile: both texts are kept";
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    });
    return el("details.note", { open: Boolean(field.value) }, el("summary", { title: "Write a note (m)" }, "note"), field,
      el("button.small", { type: "button", id: "save-note", title: "Ctrl+Enter", onclick: save }, "save note"), " ", status);
  };

  Toolyard.writeNote = () => {
    const field = document.getElementById("note");
    if (!field) return;
    field.closest("details").open = true;
    field.focus();
  };

  // Saved views ------------------------------------------------------------------------------------------------------

  // `saved`: the views and why nothing can be written. `onQuery(text)`: the user chose a view.
  Toolyard.savedViews = (saved, onQuery) => {
    readOnly = Toolyard.exported ? "Reports are read-only." : saved.read_only;
    const menu = document.getElementById("views");
    const list = el("div");
    const name = el("input", { id: "view-name", autocomplete: "off", maxlength: 100, placeholder: "name", "aria-label": "Name of the view" });
    const status = el("p.muted", { role: "status" });
    const now = () => Toolyard.place().options.q || "";
    const choose = (event, query) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      menu.open = false;
      onQuery(query);
    };
    const change = (told, done) => attempt(status, async () => { draw(await Toolyard.tell("view", told)); return done; });
    const item = ([title, query]) => el("li",
      el("a", { href: Toolyard.address([], { q: query }), title: query, onclick: (event) => choose(event, query) }, title),
      el("code.muted", query || "(everything)"),
      readOnly ? null : el("button.small", {
        type: "button", "aria-label": `remove ${title}`, onclick: () => change({ name: title }, "removed") }, "×"));
    const submitted = (event) => {
      event.preventDefault();
      if (name.value.trim()) change({ name: name.value, query: now() }, "saved").then(() => { name.value = ""; });
    };
    const draw = ({ views }) => {
      const items = Object.entries(views).map(item);
      list.replaceChildren(items.length ? el("ul", items) : el("p.muted", "No saved views"));
    };
    menu.querySelector(".menu-body").append(list,
      readOnly ? el("p.muted", readOnly) : el("form", { onsubmit: submitted }, name, el("button", "save view")), status);
    menu.hidden = Toolyard.exported && !Object.keys(saved.views).length;
    draw(saved);
    menu.addEventListener("toggle", async () => { // somebody else may have saved one
      status.textContent = "";
      if (menu.open) await attempt(status, async () => { draw((await Toolyard.ask("overview", {})).notes); return ""; });
    });
  };

  Toolyard.openViews = () => {
    const menu = document.getElementById("views");
    menu.open = true;
    (menu.querySelector("input") || menu.querySelector("summary")).focus();
  };
})();
