"use strict";
// Data source: the server, or the data in an exported page.
(() => {
  const { Toolyard } = window;

  class Away extends Error {}
  Toolyard.Away = Away;

  const fetched = async (address, options) => {
    let answer, told;
    try {
      answer = await fetch(`api/${address}`, options);
      told = await answer.json();
    } catch {
      throw new Away("Server unreachable");
    }
    if (!answer.ok) throw new Toolyard.Refusal(told.error || answer.statusText);
    return told;
  };
  const fromServer = (name, asked, signal) => {
    const address = new URLSearchParams();
    for (const [key, value] of Object.entries(asked)) if (value !== null && value !== undefined) address.set(key, value);
    return fetched(`${name}?${address}`, { signal });
  };
  // Writes something: a note or a view.
  Toolyard.tell = (name, told) =>
    fetched(name, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(told) });

  const inside = document.getElementById("toolyard-data");
  const report = inside && new Toolyard.Report(JSON.parse(inside.textContent));
  Toolyard.exported = report !== null;
  // A report does not contain all comparisons: there are too many.
  Toolyard.comparable = (left, right) => !report || report.compared(left, right) !== undefined;
  Toolyard.ask = report ? async (name, asked) => report[name](asked) : fromServer;
})();
