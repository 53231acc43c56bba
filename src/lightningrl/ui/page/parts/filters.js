// Which rollouts are shown? Fields and chips; all of them are questions of the address, so that it can be sent.
import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { setQuery } from "../api.js";
import { figure } from "./figures.js";
import { rangeOf, RewardBars } from "./rewardbars.js";

const WAIT_MS = 250; // after the last key, before the table is asked for
export const FILTERS = ["step", "kind", "split", "status", "reward", "task", "error", "text", "group"];
const LABELS = { text: "said" };
const STATUSES = ["succeeded", "failed", "running", "queued"];

/** Change filters: the table begins at its first page again. */
export function filter(changes) {
  setQuery({ ...changes, offset: null });
}

/** `data`: the answer of the API, or undefined. */
export function Filters({ query, data }) {
  const bars = data?.histogram?.counts?.some((count) => count > 0);
  const chooseRange = (range) => filter({ reward: range === null ? null : `${range[0]}..${range[1]}` });
  return html`<section class="filters" aria-label="Filters">
    <div class="fields-row">
      <${Field} name="text" label="said" value=${query.text} placeholder="search in what was said" wide search />
      <${Field} name="task" label="task" value=${query.task} placeholder="id or input" />
      <${Field} name="error" label="error" value=${query.error} placeholder="text of the error" />
      <${Field} name="step" label="step" value=${query.step} placeholder=${data?.steps ? `${data.steps[0]} to ${data.steps[1]}` : "all"} numeric />
      <${Field} name="reward" label="reward" value=${query.reward} placeholder="0 or 0..0.5" />
      <${Choice} name="kind" label="kind" value=${query.kind} options=${data?.kinds ?? []} />
      <${Choice} name="split" label="split" value=${query.split} options=${data?.splits ?? []} />
    </div>
    <div class="row">
      <${Statuses} counts=${data?.counts ?? {}} status=${query.status} />
      <${Chosen} query=${query} />
    </div>
    <div class="bars-place">${bars && html`<${RewardBars} edges=${data.histogram.edges} counts=${data.histogram.counts} range=${rangeOf(query.reward)} onRange=${chooseRange} />`}</div>
  </section>`;
}

/** A field that changes the address a moment after the last key. */
function Field({ name, label, value = "", placeholder, wide, numeric, search }) {
  const [text, setText] = useState(value);
  const timer = useRef(null);
  const sent = useRef(value); // what this field itself put into the address is not written back: it has no spaces at its ends
  useEffect(() => {
    if (value !== sent.current) setText(value);
    sent.current = value;
  }, [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const typed = (event) => {
    const next = event.target.value;
    setText(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      sent.current = next.trim();
      filter({ [name]: sent.current || null });
    }, WAIT_MS);
  };
  return html`<label class=${wide ? "wide" : ""}><span class="soft">${label}</span>
    <input id=${search ? "search" : undefined} type=${search ? "search" : "text"} inputmode=${numeric ? "numeric" : undefined} value=${text} placeholder=${placeholder} onInput=${typed} autocomplete="off" spellcheck=${false} />
  </label>`;
}

function Choice({ name, label, value = "", options }) {
  const all = value && !options.includes(value) ? [...options, value] : options;
  return html`<label><span class="soft">${label}</span>
    <select value=${value} onChange=${(event) => filter({ [name]: event.target.value || null })}>
      <option value="">all</option>
      ${all.map((option) => html`<option key=${option} value=${option}>${option}</option>`)}
    </select>
  </label>`;
}

/** The statuses with their numbers. */
function Statuses({ counts, status }) {
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  return html`<div class="segments" role="group" aria-label="Status">
    <button type="button" aria-pressed=${!status} onClick=${() => filter({ status: null })}>all ${total.toLocaleString("en")}</button>
    ${STATUSES.filter((name) => counts[name] || name === status).map(
      (name) => html`<button key=${name} type="button" aria-pressed=${status === name} onClick=${() => filter({ status: status === name ? null : name })}>${name} ${(counts[name] ?? 0).toLocaleString("en")}</button>`,
    )}
  </div>`;
}

/** The filters that are on, as chips to take away. */
function Chosen({ query }) {
  const on = FILTERS.filter((name) => query[name]);
  if (on.length === 0) return null;
  return html`<div class="row chosen">
    ${on.map((name) => html`<button key=${name} type="button" class="small" title="Take this filter away" onClick=${() => filter({ [name]: null })}>${LABELS[name] ?? name}: ${name === "reward" ? rangeWords(query.reward) : query[name]} <span aria-hidden="true">✕</span></button>`)}
    ${on.length > 1 && html`<button type="button" class="small" onClick=${() => filter(Object.fromEntries(FILTERS.map((name) => [name, null])))}>take all away</button>`}
  </div>`;
}

function rangeWords(text) {
  const range = rangeOf(text);
  if (range === null) return text;
  return range[0] === range[1] ? figure(range[0]) : `${figure(range[0])} to ${figure(range[1])}`;
}
