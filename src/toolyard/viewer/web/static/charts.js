"use strict";
// SVG charts: lines over steps, shares, distributions. Hovering over a step shows its numbers. Without data there is no chart: null.
(() => {
  const { Toolyard } = window;
  const { el, svg, number } = Toolyard;
  const WIDTH = 560, HEIGHT = 190, LEFT = 52, RIGHT = 12, TOP = 10, BOTTOM = 34;
  const inner = { width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM };
  const COLUMNS = 240; // more columns would be narrower than a pixel
  const LINE = 17, READ = 56; // of a readout: the height of a line in pixels, the same as in views.css, and characters that fit
  const NAMES = 12; // with an own place in a legend

  const ticks = (low, high, count = 4) => {
    const rough = high / count - low / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-6; at += 1) {
      found.push(Number((at * step).toPrecision(12)));
    }
    return found;
  };
  const extent = (values) =>
    values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const added = (numbers) => numbers.reduce((a, b) => a + b, 0);
  // Halves, because the difference of two scores may overflow.
  const shareOf = (value, low, high) => (value / 2 - low / 2) / (high / 2 - low / 2);
  const heightOf = (share) => TOP + inner.height * (1 - share);
  const middle = (at, columns) => LEFT + ((at + 0.5) / columns.length) * inner.width;
  const named = (column) => (column.from === column.to ? `step ${column.from}` : `steps ${column.from} to ${column.to}`);

  // What marks stand for. Marks with a filter lead to the trajectories it finds.
  const equals = (field, name) => `${field}=${Toolyard.quoted(name)}`;
  const ofSteps = ({ from, to }) => (from === to ? `step:${from}` : `step:${from}..${to}`);
  const inBin = (edges, bin, field = "score") => {
    const low = bin > 0 ? [`${field}>=${edges[bin]}`] : [], high = bin < edges.length - 2 ? [`${field}<${edges[bin + 1]}`] : [];
    return low.length || high.length ? [...low, ...high] : [`${field}!=none`];
  };
  const filterOf = (conditions) => ({ filter: JSON.stringify(conditions) });
  const follow = ({ target }) => {
    const { filter } = target.closest("[data-filter]")?.dataset ?? {};
    if (filter) location.hash = Toolyard.listed(...JSON.parse(filter));
    return Boolean(filter);
  };

  // Combines adjacent steps if there are too many to draw: `[{from, to, rows}]`.
  Toolyard.columns = (rows) => {
    const size = Math.ceil(rows.length / COLUMNS);
    const found = [];
    for (let at = 0; at < rows.length; at += size) {
      const some = rows.slice(at, at + size);
      found.push({ from: some[0].step, to: some.at(-1).step, rows: some });
    }
    return found;
  };

  // Frames -----------------------------------------------------------------------------------------------------------

  const grid = (low, high, format = number, wanted = () => true) => ticks(low, high).filter(wanted).flatMap((value) => {
    const y = heightOf(shareOf(value, low, high));
    return [svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: "grid" }),
      svg("text", { x: LEFT - 6, y: y + 4, class: "tick end" }, format(value))];
  });
  const label = (x, y, said) => svg("text", { x, y, class: "tick middle" }, said);
  const under = (columns) => [
    ...[...new Set([0, (columns.length - 1) >> 1, columns.length - 1])].map((at) =>
      label(middle(at, columns), TOP + inner.height + 14, number(columns[at].from))),
    label(LEFT + inner.width / 2, HEIGHT - 4, "step"),
  ];
  const canvas = (title, kind, ...children) =>
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title, class: kind }, children);

  const frame = (title, drawn, legend = []) => {
    const told = el("div.readout.muted", { "aria-hidden": "true" });
    const named = legend.map(([name, hue, filter]) => el("span", { title: name }, el(filter ? "a" : "span",
      { href: filter ? Toolyard.listed(filter) : null }, el("i", { class: `paint ${hue}` }), name)));
    const figure = el("figure.chart", el("figcaption", title), drawn, told, named.length ? el("div.legend", named) : null);
    return { figure, told };
  };
  // `tell(at)`: the numbers of a column as text, shown on hover. A click opens the step.
  const overSteps = (title, columns, children, tell, legend) => {
    const hair = svg("line", { x1: -9, x2: -9, y1: TOP, y2: TOP + inner.height, class: "hair" });
    const drawn = canvas(title, "steps", children, under(columns), hair);
    const { figure, told } = frame(title, drawn, legend);
    const said = (at) => `${named(columns[at])}: ${tell(at)}`;
    // Room for the longest readout, so that nothing moves when it is filled.
    const longest = extent(columns.map((_, at) => said(at).length))[1];
    told.style.height = `${LINE * Math.ceil(longest / READ)}px`;
    const columnAt = (event) => {
      const box = drawn.getBoundingClientRect();
      const share = (((event.clientX - box.left) / box.width) * WIDTH - LEFT) / inner.width;
      return Math.min(Math.max(Math.floor(share * columns.length), 0), columns.length - 1);
    };
    drawn.addEventListener("pointermove", (event) => {
      const at = columnAt(event);
      hair.setAttribute("transform", `translate(${middle(at, columns) + 9})`);
      told.textContent = Toolyard.visible(said(at));
    });
    drawn.addEventListener("pointerleave", () => { told.textContent = ""; hair.removeAttribute("transform"); });
    drawn.addEventListener("click", (event) => {
      if (follow(event)) return;
      location.hash = Toolyard.address(["step", columns[columnAt(event)].from], { q: Toolyard.place().options.q });
    });
    return figure;
  };

  // Lines ------------------------------------------------------------------------------------------------------------

  const weighed = (rows, name, weight) => {
    const known = rows.filter((row) => row[name] !== null && row[weight]);
    const sum = added(known.map((row) => row[weight]));
    return sum ? added(known.map((row) => row[name] * row[weight])) / sum : null;
  };
  const lowestAndHighest = (rows, [lowest, highest]) => {
    const known = rows.filter((row) => row[lowest] !== null);
    return known.length ? extent(known.flatMap((row) => [row[lowest], row[highest]])) : null;
  };

  // series: [{name, of, weight, hue, format}]: the field to draw, and the weight of each step in a column. band: [lowest, highest].
  Toolyard.lines = (title, columns, series, band = null) => {
    const values = series.map((one) => columns.map((column) => weighed(column.rows, one.of, one.weight)));
    const ends = columns.map((column) => band && lowestAndHighest(column.rows, band));
    const all = [...values.flat(), ...ends.flat()].filter((value) => value !== null);
    if (!all.length) return null;
    let [low, high] = extent([0, ...all]);
    if (!(high / 2 > low / 2)) high = low + 1;
    const hue = (index) => series[index].hue || `series-${index}`;
    const { format = number } = series[0];
    const x = (at) => middle(at, columns).toFixed(1);
    const y = (value) => heightOf(shareOf(value, low, high)).toFixed(1);
    const path = (line) => line.map((value, at) =>
      (value === null ? "" : `${at && line[at - 1] !== null ? "L" : "M"}${x(at)} ${y(value)}`)).join("");
    const known = ends.map((pair, at) => [pair, at]).filter(([pair]) => pair);
    const outline = [...known.map(([pair, at]) => `${x(at)},${y(pair[1])}`),
      ...known.reverse().map(([pair, at]) => `${x(at)},${y(pair[0])}`)].join(" ");
    const dot = (value, at, index) => (value === null ? null
      : svg("circle", { cx: x(at), cy: y(value), r: columns.length > 40 ? 2 : 3, class: `dot ${hue(index)}` }));
    const drawn = [
      grid(low, high, format), outline ? svg("polygon", { points: outline, class: "band" }) : null,
      values.map((line, index) => svg("path", { d: path(line), class: `line ${hue(index)}` })),
      columns.length <= 80 ? values.map((line, index) => line.map((value, at) => dot(value, at, index))) : null];
    const tell = (at) => {
      const told = series.map((one, index) => `${one.name} ${values[index][at] === null ? "–" : format(values[index][at])}`).join(", ");
      return ends[at] ? `${told} (${number(ends[at][0])} to ${number(ends[at][1])})` : told;
    };
    const legend = series.map((one, index) => [one.name, hue(index)]);
    return overSteps(title, columns, drawn, tell, legend.length > 1 ? legend : []);
  };

  // Kinds ------------------------------------------------------------------------------------------------------------

  const countsOf = (rows, counts) => {
    const sums = new Map();
    for (const row of rows) {
      for (const [name, count] of Object.entries(row[counts])) sums.set(name, (sums.get(name) || 0) + count);
    }
    return sums;
  };
  // The most frequent names, failures first; the others are combined.
  const chosenNames = (totals) => {
    const names = [...totals.keys()].sort((a, b) => totals.get(b) - totals.get(a));
    const most = names.length > NAMES ? NAMES - 1 : names.length;
    return { shown: Toolyard.inPaletteOrder(names.slice(0, most)), others: names.slice(most) };
  };
  // `[[name, count, hue]]` of the names that occur.
  const parts = (sums, { shown, others }) => {
    const rest = added(others.map((name) => sums.get(name) || 0));
    return [...shown.map((name) => [name, sums.get(name) || 0, Toolyard.hue(name)]),
      [Toolyard.count(others.length, "other"), rest, "hue-none"]].filter(([, count]) => count);
  };

  // The share of each name in the counts `rows[…][counts]`.
  // `field`: of the filter that a name stands for.
  Toolyard.shares = (title, columns, counts, field) => {
    const totals = countsOf(columns.flatMap((column) => column.rows), counts);
    if (!totals.size) return null;
    const chosen = chosenNames(totals);
    const width = inner.width / columns.length;
    const stacks = columns.map((column) => parts(countsOf(column.rows, counts), chosen));
    const bars = stacks.map((stack, at) => {
      const all = added(stack.map(([, count]) => count));
      let bottom = TOP;
      return stack.map(([name, count, hue]) => {
        const height = (count / all) * inner.height;
        bottom += height;
        return svg("rect", { data: totals.has(name) ? filterOf([ofSteps(columns[at]), equals(field, name)]) : {},
          x: LEFT + at * width, y: bottom - height, height, class: `paint ${hue}`,
          width: Math.max(width - (width > 4 ? 1 : 0), 0.5) });
      });
    });
    const tell = (at) => stacks[at].map(([name, count]) => `${name} ${number(count)}`).join(", ") || "none";
    const legend = parts(totals, chosen).map(([name, count, hue]) => [
      `${name} (${number(count)})`, hue, totals.has(name) ? equals(field, name) : null]);
    return overSteps(title, columns, [grid(0, 1, Toolyard.percent), bars], tell, legend);
  };

  // The same for one step: one row per name.
  Toolyard.tally = (title, counts, field, step) => {
    const totals = new Map(Object.entries(counts));
    if (!totals.size) return null;
    const all = added([...totals.values()]);
    const rows = parts(totals, chosenNames(totals)).map(([name, count, hue]) => el("tr",
      el(`th.mark.${Toolyard.kind(name)}`, { title: name },
        totals.has(name) ? el("a", { href: Toolyard.listed(step, equals(field, name)) }, name) : name),
      el("td.right", number(count)),
      el("td.wide", el("div.share", el("i", { class: `paint ${hue}`, style: { width: `${(100 * count) / all}%` } })))));
    return frame(title, el("table.tally", el("tbody", rows))).figure;
  };

  // Distributions ----------------------------------------------------------------------------------------------------

  // How many trajectories have which value. `whole`: each bin is one whole number. A bar leads to its trajectories.
  Toolyard.distribution = (title, unit, { edges, counts, none, whole }, [step, field]) => {
    const most = Math.max(...counts);
    if (!most) return null;
    const width = inner.width / counts.length;
    const named = (at) => (whole ? number(edges[at]) : `${number(edges[at])} to ${number(edges[at + 1])}`);
    const bars = counts.map((count, at) => svg("rect", { data: filterOf([step, ...inBin(edges, at, field)]),
      x: LEFT + at * width + 0.5, y: heightOf(count / most), width: width - 1, height: (count / most) * inner.height,
      class: "paint series-0" }, svg("title", {}, `${named(at)}: ${count}`)));
    const places = [...new Set(whole ? [0, (counts.length - 1) >> 1, counts.length - 1] : [0, edges.length >> 1, edges.length - 1])];
    const labels = places.map((at) =>
      label(LEFT + (at + (whole ? 0.5 : 0)) * width, TOP + inner.height + 14, number(edges[at])));
    const drawn = canvas(title, null, grid(0, most, number, Number.isInteger), bars, labels,
      label(LEFT + inner.width / 2, HEIGHT - 4, unit));
    drawn.addEventListener("click", follow);
    const unknown = none ? el("p.muted", el("a", { href: Toolyard.listed(step, `${field}:none`) }, `${number(none)} unknown`)) : null;
    return el("div", frame(title, drawn).figure, unknown);
  };

  // Distributions over steps: darker cells hold more of a step's scores.
  Toolyard.heat = (title, edges, columns) => {
    const width = inner.width / columns.length, height = inner.height / (edges.length - 1);
    const sums = columns.map(({ rows }) => edges.slice(1).map((_, bin) => added(rows.map((row) => row.histogram.counts[bin]))));
    if (!sums.flat().some(Boolean)) return null;
    const cells = sums.map((counts, at) => {
      const most = Math.max(...counts);
      return counts.map((count, bin) => (count ? svg("rect", { data: filterOf([ofSteps(columns[at]), ...inBin(edges, bin)]),
        x: LEFT + at * width, y: TOP + inner.height - (bin + 1) * height, width: Math.max(width, 0.5), height,
        class: "heat", "fill-opacity": (0.12 + 0.88 * (count / most)).toFixed(2) }) : null));
    });
    const tell = (at) => {
      const most = Math.max(...sums[at]), bin = sums[at].indexOf(most);
      const none = added(columns[at].rows.map((row) => row.histogram.none));
      const told = most ? [`most (${number(most)}) from ${number(edges[bin])} to ${number(edges[bin + 1])}`] : [];
      return [...told, ...(none ? [`${number(none)} without a score`] : [])].join(", ");
    };
    return overSteps(title, columns, [grid(edges[0], edges.at(-1)), cells], tell);
  };
})();
