"use strict";
// The query language, for filters that the page itself makes and for pages without a server; `toolyard.viewer.query`
// describes it.
(() => {
  const { Toolyard } = window;

  class Refusal extends Error {}
  Toolyard.Refusal = Refusal;

  const ALWAYS = ["chars", "step", "line", "sample", "group"]; // numbers that every line has
  const NUMBERS = ["score", "tools", "failed_calls", "turns", "length", "prompt", "time", "started", ...ALWAYS];
  const TEXTS = ["finish", "state", "source", "task", "truth", "id", "file", "run"];
  const OF_CALLS = ["tool", "verdict", "error", "call_time"]; // in a row, they are about the same call
  const REWARD = "reward.";
  const FLAG = new Map([["damaged", (row) => Boolean(row.damaged)], ["failed", (row) => row.state === "FAILED"]]);
  const KIND = new Map([
    ...NUMBERS.map((name) => [name, "number"]), ...TEXTS.map((name) => [name, "text"]),
    ["tool", "text"], ["verdict", "text"], ["error", "text"], ["call_time", "number"], ["failed", "flag"], ["damaged", "flag"],
    ["text", "content"],
  ]);
  const SORTABLE = [...NUMBERS, ...TEXTS];
  const COLUMN = new Map([
    ["length", "response_tokens"], ["prompt", "prompt_tokens"], ["time", "seconds"], ["id", "request_id"],
    ["failed_calls", "failed_tools"], ["started", "started_at"], ["group", "group_id"]]);
  const FLAGS = new Map([["yes", true], ["true", true], ["1", true], ["no", false], ["false", false], ["0", false]]);
  const NAME = /([A-Za-z_][A-Za-z_0-9]*(?:\.[^\s:=<>!"]+)?)(!=|<=|>=|[:=<>])/y;
  const NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$/;
  const SPACE = /\s*/y;
  const BARE = /\S*/y;
  const ESCAPE = /\\(["\\nt])/g;
  const TESTS = {
    ":": (has, value) => has === value, "<": (has, value) => has < value, "<=": (has, value) => has <= value,
    ">": (has, value) => has > value, ">=": (has, value) => has >= value,
  };

  const column = (row, field) => row[COLUMN.get(field) || field];
  const folded = (text) => text.toLowerCase();

  class Parser {
    constructor(text) {
      this.text = text;
      this.at = 0;
      this.alternatives = [[]];
      this.sort = new Map();
      this.terms = []; // as they were written
    }

    // Throws unless `right`.
    insist(right, problem, position = this.term) {
      if (!right) throw new Refusal(`at character ${position + 1}: ${problem}`);
    }

    match(pattern) {
      pattern.lastIndex = this.at;
      return pattern.exec(this.text);
    }

    parse() {
      for (;;) {
        this.at += this.match(SPACE)[0].length;
        if (this.at >= this.text.length) break;
        this.term = this.at;
        this.one();
        this.terms.push(this.text.slice(this.term, this.at));
      }
      const complete = this.alternatives.length === 1 || this.alternatives.at(-1).length;
      this.insist(complete, "a condition is missing after `or`", this.text.length);
      return { alternatives: this.alternatives.filter((one) => one.length), sort: [...this.sort], terms: this.terms };
    }

    one() {
      const word = this.match(BARE)[0];
      if (word.toLowerCase() === "or") {
        this.insist(this.alternatives.at(-1).length, 'a condition is missing before `or`; to search for the word, write "or"');
        this.at += 2;
        this.alternatives.push([]);
        return;
      }
      const negated = word.length > 1 && word[0] === "-";
      this.at += negated ? 1 : 0;
      const name = this.match(NAME);
      if (!name) {
        this.content(this.value(), negated);
      } else {
        this.at += name[0].length;
        if (name[1].toLowerCase() === "sort") this.sorting(name[2], negated);
        else this.field(name[1], name[2], negated);
      }
    }

    field(written, given, negated) {
      const lower = written.toLowerCase();
      const field = lower.startsWith(REWARD) ? REWARD + written.slice(REWARD.length) : lower;
      const kind = field.startsWith(REWARD) ? "number" : KIND.get(field);
      this.insist(kind, `unknown field '${field}'; the fields are ${[...KIND.keys()].join(", ")} and sort`);
      this.insist(/\S/.test(this.text[this.at] ?? ""), `${field}${given} must be followed by a value, without a space`);
      const turned = given === "!=" ? !negated : negated;
      const operator = given === "!=" ? "=" : given;
      const quoted = this.text[this.at] === '"';
      this.start = this.at;
      const value = this.value();
      if (kind === "content") this.content(value, turned, operator);
      else if (kind === "text") this.words(field, operator, value, turned);
      else {
        this.insist(!quoted, `${field} is not text: remove the quotes`, this.start);
        if (kind === "number") this.numeric(field, operator === "=" ? ":" : operator, value, turned);
        else this.flag(field, operator, value, turned);
      }
    }

    words(field, operator, value, negated) {
      this.insist(":=".includes(operator), `${field} is text: write ${field}:${value} for contains or ${field}=${value} for equals`);
      this.insist(value || operator === "=", `the text is empty; ${field}="" finds rows whose ${field} is empty`);
      const wanted = folded(value);
      const holds = operator === ":" ? (text) => folded(text).includes(wanted) : (text) => folded(text) === wanted;
      this.addTest(field, holds, negated);
    }

    content(value, negated, operator = ":") {
      this.insist(":=".includes(operator), `text can only be searched: write text:${value}`);
      this.insist(value, "the text to search for is empty");
      const wanted = folded(value);
      this.add((row, report) => report.said(row).some((text) => text.includes(wanted)), negated);
    }

    flag(field, operator, value, negated) {
      const right = ":=".includes(operator) && FLAGS.has(value.toLowerCase());
      this.insist(right, `write ${field}:yes or ${field}:no`, this.start);
      const wanted = FLAGS.get(value.toLowerCase());
      this.add((row) => FLAG.get(field)(row) === wanted, negated);
    }

    numeric(field, operator, value, negated) {
      if (value.toLowerCase() === "none") {
        const right = !ALWAYS.includes(field) && operator === ":";
        this.insist(right, `write ${field}:none or ${field}!=none; ${ALWAYS.join(", ")} are always numbers`, this.start);
        this.addTest(field, (has) => has === null, negated);
      } else if (value.includes("..")) {
        const [, first, second] = /^(.*?)\.\.(.*)$/s.exec(value);
        const right = operator === ":" && (first || second);
        this.insist(right, `a range is written ${field}:1..5, ${field}:1.. or ${field}:..5`, this.start);
        const low = first ? this.number(field, first) : -Infinity;
        const high = second ? this.number(field, second) : Infinity;
        this.insist(low <= high, `the range is empty; did you mean ${field}:${high}..${low}?`, this.start);
        this.addTest(field, (has) => has !== null && has >= low && has <= high, negated);
      } else {
        const wanted = this.number(field, value);
        this.addTest(field, (has) => has !== null && TESTS[operator](has, wanted), negated);
      }
    }

    number(field, value) {
      const number = NUMBER.test(value) ? Number(value) : NaN;
      const told = `'${value}' is not a number; ${field} takes a number such as 0.5, or a range such as 1..5`;
      this.insist(Number.isFinite(number), told, this.start);
      return number;
    }

    sorting(operator, negated) {
      this.insist(!negated && ":=".includes(operator), "write sort:score, or sort:-score for descending order");
      const start = this.at;
      const value = this.bare();
      const field = value.replace(/^-/, "").toLowerCase();
      const told = `cannot sort by '${field}'; expected one of ${SORTABLE.join(", ")}`;
      this.insist(SORTABLE.includes(field), told, start);
      if (!this.sort.has(field)) this.sort.set(field, value.startsWith("-") ? -1 : 1);
    }

    // `holds` is asked about the value of the field.
    addTest(field, holds, negated) {
      if (OF_CALLS.includes(field)) (this.alternatives.at(-1).calls ??= []).push((call) => holds(call[field]) !== negated);
      if (!OF_CALLS.includes(field)) {
        const reward = field.startsWith(REWARD) ? field.slice(REWARD.length) : null;
        this.add((row, report) => holds(reward === null ? column(row, field) : report.rewards(row)[reward] ?? null), negated);
      } else if (negated) {
        this.add((row, report) => report.callsOf(row).some((call) => holds(call[field])), true);
      } else {
        const together = (this.alternatives.at(-1).ofCalls ??= []);
        together.push((call) => holds(call[field]));
        if (together.length === 1) {
          this.add((row, report) => report.callsOf(row).some((call) => together.every((one) => one(call))), false);
        }
      }
    }

    add(holds, negated) {
      this.alternatives.at(-1).push(negated ? (row, report) => !holds(row, report) : holds);
    }

    bare() {
      const [word] = this.match(BARE);
      this.at += word.length;
      return word;
    }

    value() {
      if (this.text[this.at] !== '"') return this.bare();
      const opened = this.at;
      let at = opened + 1;
      while (at < this.text.length && this.text[at] !== '"') at += this.text[at] === "\\" ? 2 : 1;
      this.insist(at < this.text.length, "the quote is not closed", opened);
      this.at = at + 1;
      const told = 'a space is missing after the quote; write \\" for a quote in the text';
      this.insist(/\s/.test(this.text[this.at] ?? " "), told, this.at);
      return this.text.slice(opened + 1, at).replace(ESCAPE, (_, char) => ({ n: "\n", t: "\t" })[char] || char);
    }
  }

  const compared = (one, other, sign) => {
    if (one === other) return 0;
    if (one === null || other === null) return one === null ? 1 : -1; // rows without a value come last
    return one < other ? -sign : sign;
  };

  // The `rows` that match the query `text`, in its order. `report` has their text and verdicts.
  Toolyard.filtered = (rows, text, report) => {
    const { alternatives, sort } = new Parser(text).parse();
    const all = (conditions, row) => conditions.every((one) => one(row, report));
    const holds = (row) => !alternatives.length || alternatives.some((conditions) => all(conditions, row));
    const value = (row, field) => (TEXTS.includes(field) ? folded(column(row, field)) : column(row, field));
    return rows.filter(holds).sort((one, other) => {
      for (const [field, sign] of sort) {
        const order = compared(value(one, field), value(other, field), sign);
        if (order) return order;
      }
      return 0;
    });
  };
  // Which calls of matching rows the query `text` is about.
  Toolyard.aboutCalls = (text) => {
    const { alternatives } = new Parser(text).parse();
    return (call) => !alternatives.length || alternatives.some(({ calls = [] }) => calls.every((holds) => holds(call)));
  };

  // What may be written next, as the server says it; null for values of a text field.
  const NOTES = { number: "a number", text: "text", flag: "yes or no", content: "text to search for", order: "order" };
  Toolyard.suggestions = (field, part, rewards) => {
    const wanted = part.toLowerCase(), kind = KIND.get(field);
    if (kind === "text") return null;
    const offered = field === "sort" ? SORTABLE : kind === "flag" ? ["yes", "no"] : [];
    if (field) return offered.filter((value) => value.includes(wanted)).map((value) => [value, null]);
    const named = [...new Set(rewards)].sort().map((name) => [REWARD + name, "number"]);
    const fields = [...KIND, ...named, ["sort", "order"]].filter(([name]) => name.toLowerCase().includes(wanted));
    return fields.sort(([one], [other]) => other.startsWith(wanted) - one.startsWith(wanted)).map(([name, is]) => (
      [is === "number" ? name : `${name}:`, NOTES[is]]));
  };

  // Writing queries --------------------------------------------------------------------------------------------------

  const escaped = (text) => text.replace(/["\\]/g, "\\$&").replace(/\n/g, "\\n").replace(/\t/g, "\\t");
  // A value as it is written after an operator.
  Toolyard.quoted = (value) => (/\s|^"|^$/.test(value) ? `"${escaped(value)}"` : value);
  // The query with `conditions` added. They replace what it says about the same fields: marks are drawn within the filter,
  // so they stand for a part of what it finds.
  Toolyard.narrowed = (text, ...conditions) => {
    let terms = [];
    try { ({ terms } = new Parser(text).parse()); } catch { /* the text is not a query: only the conditions count */ }
    const field = (term) => /^([a-z_]+)[:=<>]/i.exec(term)?.[1].toLowerCase();
    const replaced = new Set(conditions.map(field));
    const sides = [[]], sorting = [];
    for (const term of terms) {
      if (term.toLowerCase() === "or") sides.push([]);
      else if (field(term) === "sort") sorting.push(term);
      else if (!field(term) || !replaced.has(field(term))) sides.at(-1).push(term);
    }
    const all = sides.every((side) => side.length) ? sides : [[]]; // a side without conditions finds everything
    const written = all.map((side) => [...side, ...conditions].join(" ")).join(" or ");
    return [written, ...sorting].join(" ").trim();
  };
  // The address of the trajectories that a mark stands for, within the current filter.
  Toolyard.listed = (...conditions) => {
    const { q = "" } = Toolyard.place().options;
    return Toolyard.address([], { q: Toolyard.narrowed(q, ...conditions) });
  };
})();
