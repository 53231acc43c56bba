// Which tools, retrievals and agents did the telemetry tell of, with which inputs and outputs?
import { html } from "../vendor/preact.js";
import { duration } from "./figures.js";
import { Folded, laidOut, visible } from "./plain.js";

export function Spans({ spans, from, href }) {
  if (spans.length === 0) return null;
  return html`<details class="raw">
    <summary>Tools and other events, as a table (${spans.length})</summary>
    <div class="scroll"><table aria-label="Tools and other events">
      <thead><tr><th scope="col">kind</th><th scope="col">name</th><th scope="col">asked by</th><th scope="col" class="number">began after</th><th scope="col" class="number">time</th><th scope="col">input</th><th scope="col">output</th></tr></thead>
      <tbody>
        ${spans.map(
          (span) => html`<tr key=${span.id}>
            <td>${span.kind}</td>
            <td>${visible(span.name)}${span.status === "error" && html` <span class="bad">failed</span>`}</td>
            <td>${span.call === null ? html`<span class="soft">–</span>` : html`<a href=${href(span.call)}>call ${span.call}</a>`}</td>
            <td class="number">${duration(Math.max(0, span.started_at - (from ?? span.started_at)))}</td>
            <td class="number">${duration(span.ended_at - span.started_at)}</td>
            <td><${Said} text=${span.input} /></td>
            <td>${span.error ? html`<span class="bad"><${Said} text=${span.error} /></span>` : html`<${Said} text=${span.output} />`}</td>
          </tr>`,
        )}
      </tbody>
    </table></div>
  </details>`;
}

function Said({ text }) {
  return text === null ? html`<span class="soft">–</span>` : html`<${Folded} text=${laidOut(text)} lines=${4} characters=${240} mono />`;
}
