// How are values spread? Bars that select their range when they are clicked.
import { html } from "../vendor/preact.js";
import { figure } from "./figures.js";

/** `edges` has one more entry than `counts`; `selected`: [low, high] or null; `onSelect([low, high] | null)`. */
export function Histogram({ edges, counts, selected, onSelect, label }) {
  const most = Math.max(1, ...counts);
  return html`<div class="histogram" role="group" aria-label=${label}>
    ${counts.map((size, at) => {
      const [low, high] = [edges[at], edges[at + 1]];
      const on = selected && selected[0] <= low && high <= selected[1];
      const words = `${figure(low)} to ${figure(high)}: ${size.toLocaleString("en")}`;
      return html`<button key=${at} class="bar" title=${words} aria-label=${words} aria-pressed=${Boolean(on)} onClick=${() => onSelect(on ? null : [low, high])}>
        <span style=${{ height: `${size ? Math.max(3, (100 * size) / most) : 0}%` }}></span>
      </button>`;
    })}
    <span class="from">${figure(edges[0])}</span><span class="to">${figure(edges.at(-1))}</span>
  </div>`;
}
