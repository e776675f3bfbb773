"use strict";
// Escape sequences of terminals in what programs print. Foreground colors, bold, italic and underlined text are shown; other
// control sequences (moving the cursor, erasing) are left out. Nothing can hide text: backgrounds and "concealed" are ignored,
// and whatever has contents of its own (titles, links) stays visible, by name.
(() => {
  const { Toolyard } = window;
  const { el } = Toolyard;
  // The index has U+FFFD where a line has an escape character.
  const SEQUENCE = /(?:\u001b\[|\u009b|\ufffd\[(?=[\d;]*m))([0-9;:?<=>]{0,64})[ -/]{0,8}([@-~])/g;
  const COLORS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];
  const ON = new Map([[1, "bold"], [3, "italic"], [4, "underline"]]);
  const OFF = new Map([[22, "bold"], [23, "italic"], [24, "underline"]]);

  // `now`: the styles that are on, changed by the numbers of one sequence.
  const apply = (now, numbers) => {
    for (let at = 0; at < numbers.length; at += 1) {
      const code = numbers[at];
      if (code === 0) { now.styles.clear(); now.color = null; }
      else if (ON.has(code)) now.styles.add(ON.get(code));
      else if (OFF.has(code)) now.styles.delete(OFF.get(code));
      else if (code === 39) now.color = null;
      else if ((code >= 30 && code <= 37) || (code >= 90 && code <= 97)) now.color = COLORS[code % 10];
      else if (code === 38 || code === 48) at += numbers[at + 1] === 2 ? 4 : 2; // one of 256 or 16 million colors
    }
  };
  const shown = (text, { styles, color }) => {
    if (!text) return [];
    const classes = [...[...styles].map((style) => `ansi-${style}`), ...(color ? [`ansi-${color}`] : [])];
    return [classes.length ? el(`span.${classes.join(".")}`, text) : Toolyard.text(text)];
  };

  Toolyard.withoutAnsi = (text) => text.replace(SEQUENCE, "");
  // The text as nodes.
  Toolyard.ansi = (text) => {
    const now = { styles: new Set(), color: null };
    const nodes = [];
    let done = 0;
    for (const { index, 0: whole, 1: numbers, 2: command } of text.matchAll(SEQUENCE)) {
      nodes.push(...shown(text.slice(done, index), now));
      done = index + whole.length;
      if (command === "m") apply(now, numbers.split(/[;:]/).map(Number));
    }
    nodes.push(...shown(text.slice(done), now));
    return nodes;
  };
})();
