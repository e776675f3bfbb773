"use strict";
// Timelines: the stages of a request, and stacked sums.
(() => {
  const { Toolyard } = window;
  const { el, svg, seconds } = Toolyard;
  const WIDTH = 1000, HEIGHT = 26;
  const STAGES = ["queue", "engine", "limiter", "tool", "interaction", "reward", "other"];

  const told = (segment) => {
    const turn = segment.turn === null ? "" : `, turn ${segment.turn + 1}`;
    return `${segment.stage}${turn}: ${seconds(segment.end - segment.start)}${segment.label ? ` (${segment.label})` : ""}`;
  };

  // A request, on a scale of `whole` seconds.
  Toolyard.timeline = (timeline, whole = timeline.seconds) => {
    const x = (at) => (whole ? (at / whole) * WIDTH : 0);
    const bars = timeline.segments.map((segment) => svg("rect", {
      x: x(segment.start), y: 3, width: Math.max(x(segment.end) - x(segment.start), 1), height: HEIGHT - 6,
      class: `stage-${segment.stage}` }, svg("title", {}, told(segment))));
    const turns = timeline.segments.filter((segment) => segment.stage === "engine" && segment.turn !== null).map((segment) =>
      svg("line", { x1: x(segment.start), x2: x(segment.start), y1: 0, y2: HEIGHT, class: "turn" }));
    const stages = Toolyard.byStage(timeline).map(([stage, sum]) => `${stage} ${seconds(sum)}`).join(", ");
    return svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "timeline", role: "img",
      "aria-label": `${seconds(timeline.seconds)}: ${stages}` }, bars, turns);
  };
  Toolyard.scale = (whole) =>
    el("div.scale", { "aria-hidden": "true" }, [0, 0.25, 0.5, 0.75, 1].map((share) => el("span", seconds(share * whole))));

  // All stages in a row: `[[stage, seconds]]`.
  Toolyard.stacked = (sums) => {
    let at = 0;
    const segments = sums.map(([stage, sum]) => ({ stage, start: at, end: (at += sum), turn: null, label: "" }));
    return Toolyard.timeline({ segments, seconds: at });
  };
  Toolyard.inOrder = (byStage) => STAGES.filter((stage) => byStage[stage]).map((stage) => [stage, byStage[stage]]);
  Toolyard.byStage = (timeline) => {
    const sums = new Map();
    for (const { stage, start, end } of timeline.segments) sums.set(stage, (sums.get(stage) || 0) + end - start);
    return STAGES.filter((stage) => sums.has(stage)).map((stage) => [stage, sums.get(stage)]);
  };
  Toolyard.stageLegend = (sums) => {
    const whole = sums.reduce((total, [, sum]) => total + sum, 0);
    return el("div.legend", sums.map(([stage, sum]) =>
      el("span", el(`i.stage-${stage}`), `${stage} `, el("strong", seconds(sum)), ` ${Toolyard.percent(sum / whole)}`)));
  };
})();
