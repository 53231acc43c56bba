// One curve with everything about it: what it means, its legend, its plot, and the words of health.
import { html, useMemo } from "../vendor/preact.js";
import { Advice } from "./advice.js";
import { Legend, Plot } from "./plot.js";

/**
 * `chart`: of charts.js. `policies`: their colours stay the same in all charts. `cursor`: {x, last, step, onStep, onOpen, marks}.
 * `advice`: warnings and notes about this curve.
 */
export function ChartCard({ chart, policies, cursor, advice = [] }) {
  const lines = useMemo(() => styled(chart.lines, policies), [chart, policies]);
  const { title, unit, tip, share, zero, digits, id } = chart;
  return html`<section class=${`card chart ${advice.some(({ warning }) => warning) ? "warned" : ""}`} id=${id} aria-label=${title}>
    <h3 title=${tip}>${title}${unit && html` <span class="unit">${unit}</span>`}</h3>
    ${tip && html`<p class="tip">${tip}</p>`}
    <${Legend} lines=${lines} x=${cursor.x} step=${cursor.step} share=${share} digits=${digits} />
    <${Plot} title=${title} unit=${unit} share=${share} zero=${zero} lines=${lines} ...${cursor} />
    ${advice.map((each) => html`<${Advice} key=${each.text} ...${each} />`)}
  </section>`;
}

/** A policy keeps its colour; several lines of one chart get a colour each. */
function styled(lines, policies) {
  return lines.map((line, at) => ({ ...line, style: ((lines.length === policies.length && line.policy ? policies.indexOf(line.policy) : at) % 8) + 1 }));
}
