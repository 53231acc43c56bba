// Curves over steps. A legend with the values at the chosen step, intervals as bands, marks where something happened.
import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import uPlot from "../vendor/uPlot.min.mjs";
import { colour, useTheme } from "../theme.js";
import { figure, share as percent, tick } from "./figures.js";

/**
 * `x`: steps; the axis goes from 0 to `last`. `lines`: [{label, values, low, high, style, dash, points}]; `values` has null where there is none;
 * `style` picks the colour, `dash` how the line is broken. `marks`: [{x, kind}]. `step`: the chosen x or null; `onStep(x)` while somebody points at one,
 * `onOpen(x)` when it is clicked. Keep `x`, `lines` and `marks` the same objects while nothing changes.
 */
export function Plot({ title, unit, share, zero, range, x, lines, marks, last, step, onStep, onOpen, height = 140, axisTitle }) {
  const theme = useTheme();
  const box = useRef(null);
  const plot = useRef(null);
  const handlers = useRef({});
  handlers.current = { onStep, onOpen, marks, last, step };
  const shape = JSON.stringify([theme, share, zero, range, height, axisTitle, lines.map(({ label, style, dash, points, low }) => [label, style, dash, points, Boolean(low)])]);
  const data = useMemo(() => dataOf(x, lines), [x, lines]);
  useEffect(() => {
    const element = box.current; // gone from the ref when the view is left, while the observer still tells of it
    const made = new uPlot(optionsOf({ share, zero, range, lines, height, unit, axisTitle, width: element.clientWidth, handlers }), data, element);
    plot.current = made;
    const watcher = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height }));
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      made.destroy();
    };
  }, [shape]);
  useEffect(() => {
    if (plot.current.data !== data) plot.current.setData(data);
  }, [data]);
  useEffect(() => plot.current.redraw(false), [marks]);
  useEffect(() => point(plot.current, step), [step, data, shape]);
  return html`<div class="plot" ref=${box} role="img" aria-label=${spoken(title, unit, share, x, lines)} style=${{ height: `${height}px` }}></div>`;
}

/** The lines of a plot with their values at `step`, or the latest ones; `write` makes a figure of a value. */
export function Legend({ lines, x, step, share, digits, write = (value) => written(value, share, digits) }) {
  return html`<ul class="plot-legend">
    ${lines.map((line, at) => {
      const { value, where } = valueAt(line, x, step);
      const interval = where !== null && line.low ? between(line, where, write) : "";
      const title = where === null ? "no value" : `${line.label || "value"} at step ${x[where]}: ${write(value)}${interval}`;
      return html`<li key=${line.label} title=${title}>
        <span class=${`line-mark ${line.points ? "dots" : ""}`} style=${markOf(line, `var(--series-${line.style ?? at + 1})`)}></span>
        ${line.label && html`<span class="soft">${line.label}</span>`}
        <span class="value">${write(value)}<span class="soft">${interval}</span></span>
      </li>`;
    })}
  </ul>`;
}

function between({ low, high }, where, write) {
  return low[where] === null ? "" : ` (${write(low[where])} to ${write(high[where])})`;
}

function written(value, share, digits) {
  return share ? percent(value) : figure(value, digits);
}

/** The value at `step`, or of the last step before it that has one: a held-out curve has values every few steps. */
function valueAt({ values }, x, step) {
  let where = step === null ? x.length - 1 : x.findLastIndex((each) => each <= step);
  while (where >= 0 && values[where] === null) where -= 1;
  return where < 0 ? { value: null, where: null } : { value: values[where], where };
}

function spoken(title, unit, share, x, lines) {
  const parts = lines.map((line) => {
    const first = line.values.findIndex((value) => value !== null);
    const { value, where } = valueAt(line, x, null);
    if (where === null) return `${line.label} no values`;
    return `${line.label} ${written(line.values[first], share)} at step ${x[first]}, ${written(value, share)} at step ${x[where]}`.trim();
  });
  return `${title}${unit && !share ? `, ${unit}` : ""}: ${parts.join("; ")}`;
}

/** uPlot's columns: x, the lines, and after them low and high of those with an interval. */
function dataOf(x, lines) {
  return [x, ...lines.map(({ values }) => values), ...lines.filter(({ low }) => low).flatMap(({ low, high }) => [low, high])];
}

function optionsOf({ share, zero, range, lines, height, unit, axisTitle, width, handlers }) {
  const [grid, soft] = [colour("--line"), colour("--soft")];
  const font = "12px system-ui, sans-serif";
  const axis = { stroke: soft, font, labelFont: font, labelSize: 18, labelGap: 0, grid: { stroke: grid, width: 1 }, ticks: { show: false }, gap: 4 };
  const shades = lines.map(({ style }, at) => colour(`--series-${style ?? at + 1}`));
  return {
    width,
    height,
    padding: [10, 10, 0, 0],
    legend: { show: false },
    scales: { x: { time: false, range: () => [0, Math.max(4, handlers.current.last)] }, y: { range: (u, low, high) => limits(low, high, zero, range) } },
    axes: [
      { ...axis, size: 24, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000], space: 40, grid: { show: false }, label: axisTitle ? "step" : undefined },
      { ...axis, size: 54, space: 24, label: axisTitle, values: (u, ticks, axis, space, apart) => ticks.map((each) => (share ? `${tick(100 * each, 100 * apart)} %` : tick(each, apart))) },
    ],
    series: [{}, ...lines.map((line, at) => seriesOf(line, shades[at])), ...lines.filter(({ low }) => low).flatMap(() => [HIDDEN, HIDDEN])],
    bands: bandsOf(lines, shades),
    cursor: { x: true, y: false, bind: UNBOUND, drag: { x: false, click: NOTHING }, points: { size: 7 } },
    hooks: { ready: [(u) => begin(u, handlers)], drawClear: [(u) => drawMarks(u, handlers.current.marks ?? [])] },
  };
}

const HIDDEN = { points: { show: false }, width: 0, stroke: "transparent", spanGaps: true };
const NOTHING = () => null;
/** The page has one cursor for all plots, so uPlot's own handling of the mouse is off. */
const UNBOUND = { mousedown: NOTHING, mouseup: NOTHING, click: NOTHING, dblclick: NOTHING, mousemove: NOTHING, mouseleave: NOTHING, mouseenter: NOTHING };

const DASHES = [undefined, [6, 3], [2, 3], [9, 3, 2, 3]];

/** One or two values are drawn as points too; what is drawn changes while the run goes on. */
function seriesOf({ points, dash = 0 }, stroke) {
  const show = (u, at) => Boolean(points) || u.data[at].filter((value) => value !== null).length < 3;
  return { stroke, width: 1.6, spanGaps: true, dash: DASHES[dash % DASHES.length], points: { show, size: 6, fill: stroke, stroke } };
}

/** The mark of a line in the legend: its colour, broken as the line is. */
function markOf({ points, dash = 0 }, shade) {
  const [drawn, gap] = points ? [] : (DASHES[dash % DASHES.length] ?? []);
  return { background: gap ? `repeating-linear-gradient(90deg, ${shade} 0 ${drawn}px, transparent ${drawn}px ${drawn + gap}px)` : shade };
}

function bandsOf(lines, shades) {
  let at = lines.length + 1;
  return lines.flatMap(({ low }, each) => {
    if (!low) return [];
    at += 2;
    return [{ series: [at - 1, at - 2], fill: shades[each].replace(/^rgb\((.*)\)$/, "rgba($1, 0.15)") }];
  });
}

/** Limits of the y axis: with room around the curve, from 0 where that means something, never of no height. */
function limits(low, high, zero, range) {
  if (low === null || high === null) return range ?? [0, 1];
  const room = (high - low || Math.abs(high) * 0.2 || 1) * 0.08;
  const bottom = zero ? Math.min(0, low) : low - room;
  return [range ? Math.min(range[0], bottom) : bottom, range ? Math.max(range[1], high) : high + room];
}

function begin(u, handlers) {
  point(u, handlers.current.step);
  const stepAt = (event) => u.data[0][u.posToIdx(event.clientX - u.over.getBoundingClientRect().left)];
  let touch = false;
  u.over.addEventListener("pointermove", (event) => handlers.current.onStep?.(stepAt(event)));
  u.over.addEventListener("pointerdown", (event) => {
    touch = event.pointerType === "touch"; // a finger chooses a step; the line above the curves has the link
    handlers.current.onStep?.(stepAt(event));
  });
  u.over.addEventListener("click", (event) => touch || handlers.current.onOpen?.(stepAt(event)));
}

function point(u, step) {
  const at = step === null ? -1 : u.data[0].findLastIndex((each) => each <= step);
  u.setCursor({ left: at < 0 ? -10 : u.valToPos(u.data[0][at], "x"), top: 0 }, false);
}

/** A vertical line for each mark; warnings have a triangle on top. */
function drawMarks(u, marks) {
  const { ctx, bbox } = u;
  for (const { x, kind } of marks) {
    const left = Math.round(u.valToPos(x, "x", true)) + 0.5;
    if (left < bbox.left - 1 || left > bbox.left + bbox.width + 1) continue;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour(kind === "warning" ? "--warn" : "--strong-line");
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
    ctx.stroke();
    if (kind === "warning") triangle(ctx, left, bbox.top, 5 * devicePixelRatio);
    ctx.restore();
  }
}

function triangle(ctx, x, y, size) {
  ctx.beginPath();
  ctx.moveTo(x - size, y - size);
  ctx.lineTo(x + size, y - size);
  ctx.lineTo(x, y + size / 2);
  ctx.fill();
}
