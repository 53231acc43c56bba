// The words of `lightningrl health`: warnings and notes, and the figures that they are about.
import { html } from "../vendor/preact.js";
import { Advice } from "./advice.js";
import { ErrorBox } from "./error.js";
import { figure, share } from "./figures.js";

/** `anchor(metric)`: the id of its curve, or null. */
export function HealthPanel({ health, error, advice, anchor }) {
  if (health === undefined && error) return html`<${ErrorBox} error=${error} title="The health of the run is not known" />`;
  if (health === undefined) return html`<section class="card health"><h2>Health</h2><p class="soft">…</p></section>`;
  const warnings = advice.filter(({ warning }) => warning).length;
  return html`<section class="card health" aria-label="Health of the learning signal">
    <h2>Health of the learning signal ${warnings > 0 && html`<span class="chip warn">${warnings} ${warnings === 1 ? "warning" : "warnings"}</span>`}</h2>
    ${advice.length === 0 && html`<p><${Nothing} health=${health} /></p>`}
    ${advice.map((each) => html`<${Advice} key=${each.text} ...${each} link=${each.metric && anchor(each.metric) ? html`<${ToCurve} id=${anchor(each.metric)} />` : null} />`)}
    ${health.signals.length > 0 && html`<${Figures} health=${health} anchor=${anchor} />`}
  </section>`;
}

function Nothing({ health }) {
  const steps = `${health.steps} ${health.steps === 1 ? "step" : "steps"}`;
  if (health.conclusive !== false) return html`<span class="good">No warnings</span> after ${steps}.`;
  return html`No warnings after ${steps}. Most checks need at least five steps.`;
}

/** A jump to a curve; not an address, since the hash is the view's. */
function ToCurve({ id, children = "see the curve" }) {
  const jump = () => {
    const target = document.getElementById(id);
    target?.closest("details")?.setAttribute("open", "");
    document.getElementById(id)?.scrollIntoView({ block: "center" });
  };
  return html`<button class="plain linked" onClick=${jump}>${children}</button>`;
}

function Figures({ health, anchor }) {
  const several = health.signals.some(({ policy }) => policy);
  const ends = Math.min(5, health.steps);
  return html`<details>
    <summary>Figures: the first and the last ${ends} steps</summary>
    <div class="scroll">
      <table class="narrow" aria-label="Health figures">
        <thead><tr>${several && html`<th scope="col">Policy</th>`}<th scope="col">Figure</th><th scope="col" class="number">First ${ends} steps</th><th scope="col" class="number">Last ${ends} steps</th></tr></thead>
        <tbody>${health.signals.map((signal) => html`<${Signal} key=${signal.policy + signal.name} ...${signal} several=${several} id=${signal.metric ? anchor(signal.metric) : null} />`)}</tbody>
      </table>
    </div>
  </details>`;
}

function Signal({ policy, name, first, last, kind, several, id }) {
  const write = kind === "share" ? share : figure;
  const words = name.replaceAll("`", "");
  return html`<tr>
    ${several && html`<td>${policy || "all"}</td>`}
    <td>${id ? html`<${ToCurve} id=${id}>${words}<//>` : words}</td><td class="number">${write(first)}</td><td class="number">${write(last)}</td>
  </tr>`;
}
