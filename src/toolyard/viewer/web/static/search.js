"use strict";
// Searches the current trajectory; after its last match, continues in the next one that has a match.
(() => {
  const { Toolyard } = window;
  const BLOCK = ".block, .tab-body td";
  const MOST = 5000;
  let matches = []; // each a list of marks: a match may span several colored words or tokens
  let at = -1;
  let begun = 0;

  const patternOf = (needle) => new RegExp(needle.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "giu");
  const shown = () => document.querySelector("#view .holder");
  const needle = () => document.getElementById("find")?.value.trim() || "";

  const placesIn = (text, pattern, most) => {
    const found = [];
    for (const { index, 0: said } of text.matchAll(pattern)) {
      if (found.length >= most) break;
      found.push({ from: index, to: index + said.length, marks: [] });
    }
    return found;
  };

  // Marks the places in a text node that begins at `start`.
  const markNode = (node, start, places) => {
    const pieces = document.createDocumentFragment();
    let done = 0;
    for (const place of places) {
      const from = Math.max(place.from - start, 0);
      const to = Math.min(place.to - start, node.length);
      const mark = document.createElement("mark");
      mark.textContent = node.data.slice(from, to);
      place.marks.push(mark);
      pieces.append(node.data.slice(done, from), mark);
      done = to;
    }
    pieces.append(node.data.slice(done));
    node.replaceWith(pieces);
  };

  const markBlock = (block, pattern) => {
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    const nodes = [];
    while (walker.nextNode()) if (walker.currentNode.parentElement.closest(BLOCK) === block) nodes.push(walker.currentNode);
    const places = placesIn(nodes.map((node) => node.data).join(""), pattern, MOST - matches.length);
    let start = 0;
    let first = 0;
    for (const node of nodes) {
      const end = start + node.length;
      while (first < places.length && places[first].to <= start) first += 1;
      let last = first;
      while (last < places.length && places[last].from < end) last += 1;
      if (last > first) markNode(node, start, places.slice(first, last));
      start = end;
    }
    matches.push(...places.map((place) => place.marks));
  };

  const counted = () => {
    const place = document.getElementById("matches");
    if (!place) return;
    const all = `${Toolyard.number(matches.length)}${matches.length === MOST ? " or more" : ""}`;
    place.textContent = needle() ? (at < 0 ? `${all} here` : `${Toolyard.number(at + 1)} of ${all}`) : "";
  };

  const forget = () => {
    const parents = new Set();
    for (const mark of matches.flat()) {
      parents.add(mark.parentNode);
      mark.replaceWith(...mark.childNodes);
    }
    for (const parent of parents) parent?.normalize();
    matches = [];
    at = -1;
  };

  const markAll = () => {
    forget();
    const root = shown();
    if (!root || !needle()) return counted();
    const pattern = patternOf(needle());
    // Draw what has matches but is not drawn yet: first folded parts, then those out of view.
    for (const kind of ["details.long", ".late"]) {
      for (const late of root.querySelectorAll(kind)) if (late.has(pattern)) late.fill();
    }
    for (const block of root.querySelectorAll(BLOCK)) if (matches.length < MOST) markBlock(block, pattern);
    return counted();
  };

  const goTo = (next) => {
    for (const mark of matches[at] || []) mark.classList.remove("here");
    at = next;
    for (const mark of matches[at]) mark.classList.add("here");
    for (let fold = matches[at][0].closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    matches[at][0].scrollIntoView({ block: "center" });
    counted();
  };

  // Searches a page that was just drawn.
  Toolyard.searchShown = () => {
    matches = [];
    at = -1;
    markAll();
    if (matches.length) goTo(0);
  };
  // Searches while the user types.
  Toolyard.searchTyped = () => {
    clearTimeout(begun);
    begun = setTimeout(() => {
      markAll();
      Toolyard.change({ find: needle() }, { replace: true });
    }, 120);
  };
  Toolyard.nextMatch = async (direction) => {
    if (!needle()) return;
    clearTimeout(begun);
    if (!matches.length) markAll();
    const next = at < 0 ? (direction > 0 ? 0 : matches.length - 1) : at + direction;
    if (next >= 0 && next < matches.length) {
      goTo(next);
      return;
    }
    const { options } = Toolyard.place();
    const here = document.getElementById("view").dataset.key;
    const backwards = direction < 0 ? 1 : null;
    const { row } = await Toolyard.ask("search", { needle: needle(), q: options.q, from: here, backwards });
    if (row && row.key !== here) location.hash = Toolyard.address(["t", row.key], { ...Toolyard.kept(options), find: needle() });
    else if (matches.length) goTo(direction > 0 ? 0 : matches.length - 1);
    else if (!row) document.getElementById("matches").textContent = "no matches";
  };
})();
