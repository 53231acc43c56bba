// When was that? Times in words, the exact one in a tooltip.
import { html, useEffect, useState } from "../vendor/preact.js";
import { roughly } from "./figures.js";

/** Unix seconds as "3 min ago", kept up to date. */
export function Ago({ at }) {
  const [now, setNow] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || setNow(Date.now() / 1000), 5000);
    return () => clearInterval(timer);
  }, []);
  if (at === null || at === undefined) return html`<span class="soft">–</span>`;
  const past = Math.max(0, now - at);
  return html`<${Time} at=${at} words=${past < 5 ? "just now" : `${roughly(past)} ago`} />`;
}

/** Unix seconds as a date and time of this browser's zone, or as `words` with that in the tooltip. */
export function Time({ at, words }) {
  if (at === null || at === undefined) return html`<span class="soft">–</span>`;
  const date = new Date(at * 1000);
  const full = date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
  return html`<time datetime=${date.toISOString()} title=${full}>${words ?? full}</time>`;
}
