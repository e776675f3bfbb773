"use strict";
// Answers the server's requests from the data in an exported page.
(() => {
  const { Toolyard } = window;

  const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  const tally = (names) => {
    const counts = new Map();
    for (const name of names) counts.set(name, (counts.get(name) || 0) + 1);
    return Object.fromEntries([...counts].sort((a, b) => b[1] - a[1]));
  };

  const histogram = (values, edges) => {
    const known = values.filter((value) => value !== null);
    const counts = new Array(edges.length - 1).fill(0);
    for (const value of known) {
      const bin = edges.findLastIndex((edge) => edge <= value);
      counts[Math.min(Math.max(bin, 0), counts.length - 1)] += 1;
    }
    return { counts, none: values.length - known.length };
  };
  // As on the server: a bin for each number if there are only a few whole ones.
  const BINS = 20;
  const WHOLE = new Set(["turns", "tools", "response_tokens"]);
  const equalBins = (low, high) => {
    const [from, to] = high / 2 - low / 2 < 1e-12 ? [low - 0.5, high + 0.5] : [low, high];
    return Array.from({ length: BINS + 1 }, (_, at) => from * (1 - at / BINS) + to * (at / BINS));
  };
  const distribution = (name, values, edges) => {
    const known = values.filter((value) => value !== null).sort((a, b) => a - b);
    const [low, high] = known.length ? [known[0], known.at(-1)] : [0, 1];
    const whole = WHOLE.has(name) && high - low < BINS;
    const bins = whole ? Array.from({ length: high - low + 2 }, (_, at) => low + at) : edges ?? equalBins(low, high);
    return { edges: bins, ...histogram(values, bins), whole };
  };

  class Report {
    constructor(data) {
      this.data = data;
      this.details = new Map(Object.entries(data.details));
      this.comparisons = new Map(Object.entries(data.comparisons));
      this.steps = new Map(Object.entries(data.steps));
      this.texts = new Map();
      this.called = new Map(Object.entries(data.calls));
      for (const call of [...this.called.values()].flat()) call.call_time = call.seconds;
      for (const row of data.rows) row.run = row.file.slice(0, Math.max(row.file.lastIndexOf("/"), 0));
    }

    // All text of a trajectory, part by part, in lower case.
    said({ key }) {
      if (!this.texts.has(key)) {
        const { bubbles = [], input, output, raw, failure } = this.details.get(key);
        const parts = bubbles.flatMap((bubble) => [
          ...bubble.pieces.map((piece) => piece.text), bubble.raw,
          ...bubble.calls.flatMap((call) => [call.name, call.arguments, call.code, call.response, call.error]),
        ]);
        const all = [input, output, raw, failure?.error, ...parts].filter(Boolean);
        this.texts.set(key, all.map((text) => text.toLowerCase()));
      }
      return this.texts.get(key);
    }

    // Its calls, as the index has them.
    callsOf({ key }) { return this.called.get(key) ?? []; }

    rewards({ key }) { return this.details.get(key).rewards || {}; }

    filtered(query) { return Toolyard.filtered(this.data.rows, query, this); }

    // How much of what was asked for it contains; null if all.
    get part() {
      const { matching, rows } = this.data;
      return matching > rows.length ? { of: matching, shown: rows.length } : null;
    }

    // The report has each pair in one order only.
    compared(left, right) { return this.comparisons.get(`${left}|${right}`) ?? this.comparisons.get(`${right}|${left}`); }

    there(told, what) {
      if (told === undefined) throw new Toolyard.Refusal(`${what} is not part of this report`);
      return told;
    }

    found(row, rows) { return { row: row ?? null, position: row ? rows.indexOf(row) : null }; }

    // Answers, by request name ----------------------------------------------------------------------------------------

    overview() {
      const { overview, query, rows } = this.data;
      const steps = new Set(rows.map((row) => row.step)), runs = new Set(rows.map((row) => row.run));
      return { ...overview, steps: overview.steps.filter(({ step }) => steps.has(step)), runs: overview.runs.filter((run) => runs.has(run)), title: query ? `${overview.title}: ${query}` : overview.title, count: rows.length, revision: 0 };
    }

    rows({ q = "", offset = 0, limit = 100 }) {
      const rows = this.filtered(q);
      return { count: rows.length, failed: rows.filter(Toolyard.failed).length, rows: rows.slice(offset, offset + limit), query: q };
    }

    position({ key, q = "" }) {
      const position = this.filtered(q).findIndex((row) => row.key === key);
      return { position: position < 0 ? null : position };
    }

    next_step({ step, q = "", backwards }) {
      const rows = this.filtered(q);
      const beyond = rows.map((row) => row.step).filter((one) => (backwards ? one < step : one > step));
      const wanted = backwards ? Math.max(...beyond) : Math.min(...beyond);
      return this.found(rows.find((row) => row.step === wanted), rows);
    }

    row({ key }) { return this.there(this.details.get(key), key); }

    tokens({ key }) { return this.there(this.details.get(key)?.tokens, `the tokens of ${key}`); }

    raw({ key }) {
      const { input, output, raw, ...rest } = this.row({ key });
      delete rest.tokens;
      if (raw !== undefined) return { text: raw };
      const told = "Reports do not contain the raw line; these are the fields that are shown.";
      return { text: JSON.stringify({ input, output, ...rest }), told };
    }

    find({ id }) {
      const exact = this.data.rows.filter((row) => row.request_id === id);
      const begun = this.data.rows.filter((row) => row.request_id.startsWith(id));
      const one = new Set(begun.map((row) => row.request_id)).size === 1;
      return { rows: exact.length ? exact : one ? begun : [] };
    }

    search({ needle, q = "", from, backwards }) {
      const rows = this.filtered(q);
      const wanted = needle.toLowerCase();
      const here = rows.findIndex((row) => row.key === from);
      const start = here < 0 ? (backwards ? rows.length : -1) : here;
      for (let step = 1; step <= rows.length; step += 1) {
        const row = rows[(start + (backwards ? -step : step) + 2 * rows.length) % rows.length];
        if (this.said(row).some((text) => text.includes(wanted))) return this.found(row, rows);
      }
      return this.found(undefined, rows);
    }

    compare({ left, right }) { return this.there(this.compared(left, right), "this comparison"); }

    step({ step, q = "" }) {
      const told = this.there(this.steps.get(String(step)), `step ${step}`);
      return { ...told, unfiltered: Boolean(q) };
    }

    // Without a filter, covers all matching trajectories, including those left out of the report.
    statistics({ q = "" }) {
      const { statistics } = this.data;
      if (!q) return { ...statistics, part: this.part };
      const bySteps = new Map();
      for (const row of this.filtered(q)) {
        if (!bySteps.has(row.step)) bySteps.set(row.step, []);
        bySteps.get(row.step).push(row);
      }
      const steps = [...bySteps].sort((a, b) => a[0] - b[0]).map(([step, rows]) => this.summary(step, rows, statistics.edges));
      const distributions = steps.length === 1 ? this.distributions([...bySteps.values()][0], statistics.edges) : null;
      return { steps, edges: statistics.edges, distributions, part: null };
    }

    distributions(rows, edges) {
      const whole = rows.filter((row) => !row.damaged);
      return Object.fromEntries(["score", "turns", "tools", "response_tokens", "seconds"].map((name) =>
        [name, distribution(name, whole.map((row) => row[name]), name === "score" ? edges : null)]));
    }

    groups({ q = "", ...asked }) {
      return { ...Toolyard.groupsOf(this.filtered(q), asked), several_runs: this.overview().runs.length > 1, part: this.part };
    }

    calls({ q = "" }) {
      const wanted = Toolyard.aboutCalls(q);
      const rows = this.filtered(q).sort((one, other) => one.number - other.number);
      const calls = Toolyard.callReport(rows.flatMap((row) => this.callsOf(row).filter(wanted).map((call) => ({ ...call, row }))));
      return { ...calls, part: this.part };
    }

    changes_between({ before, after, ...asked }) {
      return { ...Toolyard.changesBetween(this.filtered(before), this.filtered(after), asked), part: this.part };
    }

    suggestions({ field, part }) {
      const rewards = field ? [] : this.data.rows.flatMap((row) => Object.keys(this.rewards(row)));
      const known = Toolyard.suggestions(field, part, rewards);
      if (known) return { values: known };
      const { rows } = this.data;
      const column = (row) => (field === "id" ? row.request_id : row[field]);
      const values = ["tool", "verdict", "error"].includes(field) ? rows.flatMap((row) => this.callsOf(row).map((call) => call[field])) : rows.map(column);
      return { values: Toolyard.frequent(values, part) };
    }

    summary(step, rows, edges) {
      const whole = rows.filter((row) => !row.damaged);
      const scores = whole.map((row) => row.score).filter((score) => score !== null);
      const average = (name) => mean(whole.map((row) => row[name]).filter((value) => value !== null));
      return {
        step, count: whole.length, failed: whole.filter((row) => row.state === "FAILED").length, scored: scores.length, damaged: rows.length - whole.length,
        mean_score: mean(scores), min_score: scores.length ? Math.min(...scores) : null,
        max_score: scores.length ? Math.max(...scores) : null,
        mean_turns: average("turns"), mean_tools: average("tools"), mean_response_tokens: average("response_tokens"),
        mean_seconds: average("seconds"),
        finishes: tally(whole.map((row) => row.finish)), verdicts: tally(whole.flatMap((row) => this.callsOf(row).map((call) => call.verdict))),
        histogram: histogram(whole.map((row) => row.score), edges),
      };
    }
  }
  Toolyard.Report = Report;
})();
