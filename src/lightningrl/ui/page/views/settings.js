// With which settings does the run train? Those that differ from the defaults first; then its result.
import { html, useRef, useState } from "../vendor/preact.js";
import { useApi } from "../api.js";
import { useKeys } from "../keys.js";
import { Copy } from "../parts/copy.js";
import { Loading } from "../parts/empty.js";
import { ErrorBox } from "../parts/error.js";
import { Json } from "../parts/json.js";
import { flat, Value } from "../parts/setting.js";

export default function Settings({ route: { run } }) {
  const { data, error } = useApi(`/api/runs/${encodeURIComponent(run)}`, { live: true });
  const [text, setText] = useState("");
  const search = useRef(null);
  useKeys([["/", "search the settings", () => search.current?.focus()]]);
  if (data === undefined) return error ? html`<${ErrorBox} error=${error} />` : html`<${Loading} />`;
  const all = flat(data.settings ?? {});
  const changed = flat(data.changed);
  const found = Object.entries(all).filter(([name, value]) => `${name} ${JSON.stringify(value)}`.toLowerCase().includes(text.toLowerCase()));
  return html`<div class="stack">
    <h1>Settings</h1>
    <p class="row soft">Folder <code>${data.path}</code> <${Copy} text=${data.path} /></p>
    ${data.state === "stopped" && html`<p class="row soft">Continue it with <code>${data.resume_command}</code> <${Copy} text=${data.resume_command} /></p>`}
    <section>
      <h2>Different from the defaults</h2>
      ${Object.keys(changed).length === 0 ? html`<p class="soft">All settings have their defaults.</p>` : html`<${SettingTable} entries=${Object.entries(changed)} label="Settings that differ from the defaults" />`}
    </section>
    ${data.result !== null && html`<section><h2>Result</h2><div class="card"><${Json} value=${data.result} open=${2} /></div></section>`}
    <section>
      <div class="row apart"><h2>All settings</h2><input ref=${search} type="search" placeholder="Search (/)" aria-label="Search settings" value=${text} onInput=${(event) => setText(event.target.value)} /></div>
      ${found.length === 0 ? html`<p class="soft">No setting has “${text}” in its name or value.</p>` : html`<${SettingTable} entries=${found} changed=${changed} label="All settings" />`}
    </section>
  </div>`;
}

function SettingTable({ entries, changed, label }) {
  return html`<div class="scroll"><table class="settings" aria-label=${label}>
    <thead><tr><th scope="col">Setting</th><th scope="col">Value</th></tr></thead>
    <tbody>
      ${entries.map(([name, value]) => html`<tr key=${name} class=${changed && name in changed ? "marked" : ""}>
        <td><code>${name}</code></td>
        <td><${Value} value=${value} />${changed && name in changed && html` <span class="chip">not the default</span>`}</td>
      </tr>`)}
    </tbody>
  </table></div>`;
}
