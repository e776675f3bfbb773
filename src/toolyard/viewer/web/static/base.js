"use strict";
// Elements, numbers and addresses. Model output is only ever inserted through `text` and `textContent`, never as markup.
(() => {
  const Toolyard = (window.Toolyard = {});

  // Characters that would move, hide or reverse the surrounding text are shown by name.
  const NAMES = new Map([
    ["\u0000", "␀"], ["\u0007", "␇"], ["\u0008", "␈"], ["\r", "␍"], ["\u001b", "␛"], ["\u007f", "␡"]]);
  const UNSEEN = new RegExp("[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5"
    + "\\u180b-\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff9-\\ufffb"
    + "\\ud800-\\udfff\\u{e0000}-\\u{e0fff}]", "gu");
  const named = (char) => NAMES.get(char) || `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  Toolyard.visible = (text) => String(text).replace(/\r\n/g, "\n").replace(UNSEEN, named);

  Toolyard.text = (content) => document.createTextNode(Toolyard.visible(content));

  const READ_OUT = new Set(["title", "aria-label", "placeholder"]);
  const attribute = (node, name, value) => {
    if (value === null || value === undefined || value === false) return;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : READ_OUT.has(name) ? Toolyard.visible(value) : value);
  };
  const fill = (node, children) => {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : Toolyard.text(child));
    }
    return node;
  };

  // el("div.class", {title: "…", onclick: f}, child, "text", null, [more])
  Toolyard.el = (what, ...rest) => {
    const [tag, ...classes] = what.split(".");
    const node = document.createElement(tag || "div");
    if (classes.length) node.className = classes.join(" ");
    const given = rest[0] && typeof rest[0] === "object" && !(rest[0] instanceof Node) && !Array.isArray(rest[0]);
    if (given) for (const [name, value] of Object.entries(rest[0])) attribute(node, name, value);
    return fill(node, given ? rest.slice(1) : rest);
  };
  Toolyard.svg = (tag, attributes = {}, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) attribute(node, name, value);
    return fill(node, children);
  };

  // Numbers --------------------------------------------------------------------------------------------------------

  Toolyard.number = (value, digits = 3) => {
    if (value === null || value === undefined) return "–";
    if (typeof value !== "number") return typeof value === "string" ? value : JSON.stringify(value);
    if (Math.abs(value) >= 1e15) return value.toExponential(2);
    const rounded = Math.abs(value) >= 10 ** (digits - 1) ? Math.round(value) : Number(value.toPrecision(digits));
    return Number.isInteger(value) || Number.isInteger(rounded) ? rounded.toLocaleString("en-US") : String(rounded);
  };
  Toolyard.seconds = (value) => {
    if (value === null || value === undefined) return "–";
    if (!value) return "0 s";
    if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
    if (value < 1) return `${Toolyard.number(value * 1000)} ms`;
    if (value < 120) return `${Toolyard.number(value)} s`;
    const whole = Math.round(value);
    if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
    return `${Math.floor(whole / 3600).toLocaleString("en-US")} h ${Math.round((whole % 3600) / 60)} min`;
  };
  Toolyard.count = (number, what, many = `${what}s`) => `${Toolyard.number(number)} ${number === 1 ? what : many}`;
  Toolyard.percent = (share) => {
    if (share > 0 && share < 0.001) return "<0.1 %";
    return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
  };

  // Addresses --------------------------------------------------------------------------------------------------------
  // #/t/KEY?tab=tokens. Keys hold slashes and colons, so every part is encoded.

  Toolyard.address = (parts, options = {}) => {
    const asked = new URLSearchParams();
    for (const [name, value] of Object.entries(options)) if (value !== "" && value != null) asked.set(name, value);
    const tail = asked.toString();
    return `#/${parts.map(encodeURIComponent).join("/")}${tail ? `?${tail}` : ""}`;
  };
  Toolyard.place = () => {
    const [path, tail = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const parts = path.split("/").filter(Boolean).map((part) => {
      try { return decodeURIComponent(part); } catch { return part; }
    });
    return { parts, options: Object.fromEntries(new URLSearchParams(tail)) };
  };
  // Changes some options of the address, and nothing else.
  Toolyard.change = (options, { replace = false } = {}) => {
    const place = Toolyard.place();
    const next = Toolyard.address(place.parts, { ...place.options, ...options });
    if (replace) history.replaceState(null, "", next);
    else location.hash = next;
  };
  // The options to keep when moving to another trajectory.
  Toolyard.kept = ({ q, tab, find, plain, hide, unfold }) => ({ q, tab, find, plain, hide, unfold });

  // Copying ----------------------------------------------------------------------------------------------------------

  Toolyard.copy = async (content, button) => {
    button.dataset.name ??= button.textContent;
    try {
      await navigator.clipboard.writeText(content);
      button.textContent = "copied";
    } catch {
      const field = Toolyard.el("textarea.offscreen");
      field.value = content;
      document.body.append(field);
      field.select();
      button.textContent = document.execCommand("copy") ? "copied" : "cannot copy here";
      field.remove();
    }
    setTimeout(() => (button.textContent = button.dataset.name), 1200);
  };
  Toolyard.copyButton = (content, what = "copy") =>
    Toolyard.el("button.small", { type: "button", onclick: (event) => Toolyard.copy(content, event.currentTarget) }, what);
})();
