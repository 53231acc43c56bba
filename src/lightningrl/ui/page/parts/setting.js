// Settings as dotted names with one value each.
import { html } from "../vendor/preact.js";

/** {loop: {steps: 3}, routes: [{model: "a"}]} → {"loop.steps": 3, "routes.0.model": "a"}; lists of plain values stay
 * whole, empty tables are left out. */
export function flat(tree, prefix = "") {
  const entries = Object.entries(tree).flatMap(([name, value]) => {
    const plain = value === null || typeof value !== "object" || (Array.isArray(value) && value.every((each) => typeof each !== "object"));
    return plain ? [[prefix + name, value]] : Object.entries(flat(value, `${prefix}${name}.`));
  });
  return Object.fromEntries(entries);
}

/** A value as one would write it in a recipe. */
export function Value({ value }) {
  if (value === undefined) return html`<span class="soft">–</span>`;
  return html`<span class="mono">${JSON.stringify(value)}</span>`;
}
