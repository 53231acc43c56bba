// How is text shown that an agent said? As text, with characters that hide or turn it made visible, long ones folded.
import { html, useState } from "../vendor/preact.js";

const MARKED = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu; // control, format (bidi, tags, zero width), lone surrogates
const HARMLESS = new Set(["\n", "\t", "\u200c", "\u200d"]); // scripts and emoji need the two joiners
const LINES = 14;
const CHARACTERS = 1400;
const LINE = 64;

function nameOf(character) {
  return `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
}

/** The text as a list for Preact: a hidden character becomes a mark with its code point. */
export function visible(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(MARKED)) {
    if (HARMLESS.has(found[0])) continue;
    const name = nameOf(found[0]);
    parts.push(text.slice(from, found.index), html`<span class="hidden-character" title="a character that cannot be seen">${name}</span>`);
    from = found.index + found[0].length;
  }
  return from === 0 ? text : [...parts, text.slice(from)];
}

/** The text of a token in one string: line ends, tabs and hidden characters get a mark. */
export function marked(text) {
  return text.replace(MARKED, (character) => {
    if (character === "\n") return "↵\n";
    if (character === "\t") return "⇥\t";
    return HARMLESS.has(character) ? character : `⟨${nameOf(character)}⟩`;
  });
}

/** A text that is cut after some lines, with a button for the rest. */
export function Folded({ text, lines = LINES, characters = CHARACTERS, mono = false }) {
  const [open, setOpen] = useState(false);
  const short = cut(text, lines, characters);
  const left = text.length - short.length;
  const shown = open || left < 80 ? text : short;
  return html`<div class=${mono ? "said mono" : "said"} dir="auto">
    ${visible(shown)}${left >= 80 && !open ? "…" : null}
    ${left >= 80 &&
    html`<button type="button" class="more" aria-expanded=${open} onClick=${() => setOpen(!open)}>
      ${open ? "show less" : `show ${left.toLocaleString("en")} more characters`}
    </button>`}
  </div>`;
}

function cut(text, lines, characters) {
  const head = text.slice(0, characters);
  const ends = [...head.matchAll(/\n/g)];
  return ends.length >= lines ? head.slice(0, ends[lines - 1].index) : head;
}

/** A JSON value with line breaks where it does not fit on a line. */
export function written(value, indent = "") {
  const flat = JSON.stringify(value) ?? "";
  if (flat.length + indent.length <= LINE || value === null || typeof value !== "object") return flat;
  const inner = `${indent}  `;
  const list = Array.isArray(value);
  const parts = Object.entries(value).map(([name, part]) => inner + (list ? "" : `${JSON.stringify(name)}: `) + written(part, inner));
  return `${list ? "[" : "{"}\n${parts.join(",\n")}\n${indent}${list ? "]" : "}"}`;
}

/** JSON text with line breaks, if it is JSON; else the text itself. */
export function laidOut(text) {
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" ? written(value) : text;
  } catch {
    return text;
  }
}

/** Any JSON value: text as text, the rest as laid-out JSON. */
export function Value({ value, lines }) {
  if (typeof value === "string") return html`<${Folded} text=${value} lines=${lines} />`;
  return html`<${Folded} text=${written(value)} lines=${lines} mono />`;
}
