// What did the engine read and sample? The exact sequence: the prompt by who brought it in, then each sampled token.
import { html, useCallback, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { SCALES, strength, toneOf } from "./colours.js";
import { counted } from "./digits.js";
import { marked } from "./plain.js";
import { isSpecial, kindOf, ORIGINS, originsOf, piecesOf, textOf, tokenAt } from "./sequence.js";

/**
 * `call`: the answer of the API; `scale`: the name of the colours; `place`: the index of the chosen token, the sampled
 * ones after the prompt's; `onPlace(index, pinned)`. A token is chosen by hovering, a click, or the arrow keys.
 */
export function Tokens({ call, scale, place, onPlace, href }) {
  const root = useRef(null);
  const { prompt } = call.tokens;
  const { pieces, folds } = useMemo(() => piecesOf(prompt, call.number), [call]);
  const [open, setOpen] = useState(() => new Set());
  useEffect(() => setOpen(new Set()), [call]);
  const drawn = useMemo(
    () => html`<${Prompt} pieces=${pieces} folds=${folds} open=${open} call=${call} href=${href} onOpen=${(at) => setOpen(new Set(open).add(at))} />`,
    [pieces, open],
  );
  const sampled = useMemo(() => html`<${Sampled} call=${call} scale=${scale} />`, [call, scale]);
  const over = useCallback((event, pinned) => {
    const found = under(event, pieces, prompt.ids.length);
    if (found !== null) onPlace(found, pinned);
  }, [pieces, onPlace]);
  useEffect(() => lit(root.current, pieces, place, prompt.ids.length), [place, pieces, open, scale]);
  return html`<div
    class="sequence" ref=${root} onMouseMove=${(event) => over(event, false)} onClick=${(event) => over(event, true)}
  >${drawn}${sampled}</div>`;
}

function Prompt({ pieces, folds, open, call, href, onOpen }) {
  const told = new Set();
  return pieces.map((piece, at) => {
    if (piece.fold !== null && !open.has(piece.fold)) {
      if (told.has(piece.fold)) return null;
      told.add(piece.fold);
      return html`<${Fold} fold=${folds[piece.fold]} call=${call} onOpen=${() => onOpen(piece.fold)} />`;
    }
    const first = pieces[at - 1]?.call !== piece.call || pieces[at - 1]?.origin !== piece.origin;
    const kind = kindOf(piece, call.number);
    return html`
      ${first && kind === "sampled" && html`<a class="said-by" href=${href(piece.call)}>call ${piece.call}</a>`}
      <span class=${`piece ${kind} ${piece.special ? "special" : ""}`} data-piece=${at}>${piece.text}</span>
    `;
  });
}

/** A stretch that is not shown at first, with what is in it. */
function Fold({ fold, call, onOpen }) {
  const tokens = counted(fold.to - fold.from, "token");
  const words = fold.history ? `${tokens} that earlier calls read and sampled` : `${tokens} more`;
  const from = fold.history && call.parent !== null ? `, read from call ${call.parent}` : "";
  return html`<button type="button" class="fold" onClick=${onOpen}>⋯ ${from ? `${tokens}${from}` : words}: show</button>`;
}

function Sampled({ call, scale }) {
  const { sampled, prompt } = call.tokens;
  const chosen = SCALES[scale];
  const values = chosen.values(sampled);
  const bound = values === null ? 1 : chosen.bound(values);
  return html`
    <div class="sampled-from">${counted(sampled.ids.length, "token")} sampled${sampled.grammar ? ", constrained by a grammar" : ""}</div>
    ${sampled.ids.map((id, at) => {
      const text = textOf(sampled, at);
      const { tone, share } = toneOf(chosen, values?.[at], bound);
      const kind = `token ${tone} ${isSpecial(text) ? "special" : ""}`;
      return html`<span key=${at} class=${kind} style=${strength(share)} data-token=${prompt.ids.length + at}>${spaced(text)}</span><wbr />`;
    })}
  `;
}

/** The text of a sampled token with its spaces visible; a part of a character has no text of its own. */
function spaced(text) {
  if (text === "") return "◌";
  return marked(text).replaceAll(" ", "·");
}

/** Which token is under the pointer; null if none. */
function under(event, pieces, prompt) {
  const { token, piece } = event.target.dataset;
  if (token !== undefined) return Number(token);
  if (piece === undefined) return null;
  const offset = offsetAt(event.clientX, event.clientY);
  return offset === null ? null : Math.min(tokenAt(pieces[Number(piece)], offset), prompt - 1);
}

/** Where in its text the pointer is. Browsers name this differently. */
function offsetAt(x, y) {
  if (document.caretPositionFromPoint) return document.caretPositionFromPoint(x, y)?.offset ?? null;
  return document.caretRangeFromPoint?.(x, y)?.startOffset ?? null;
}

/** Paint the chosen token without touching the elements: a highlight over a range of text. */
function lit(root, pieces, place, prompt) {
  if (!("highlights" in CSS)) return;
  CSS.highlights.delete("token");
  const range = place === null ? null : rangeOf(root, pieces, place, prompt);
  if (range !== null) CSS.highlights.set("token", new Highlight(range));
}

function rangeOf(root, pieces, place, prompt) {
  const range = new Range();
  if (place >= prompt) {
    const token = root.querySelector(`[data-token="${place}"]`);
    if (token === null) return null;
    range.selectNodeContents(token);
    return range;
  }
  const at = pieces.findIndex((piece) => piece.from <= place && place < piece.to);
  const text = root.querySelector(`[data-piece="${at}"]`)?.firstChild;
  if (!text) return null;
  const { offsets, from } = pieces[at];
  range.setStart(text, offsets[place - from]);
  range.setEnd(text, offsets[place - from + 1] ?? text.length);
  return range;
}

/** Bring a token into view, if it is drawn. */
export function showToken(place) {
  document.querySelector(`[data-token="${place}"]`)?.scrollIntoView({ block: "nearest" });
}

/** What the colours of the prompt mean, with the number of tokens of each. */
export function Origins({ call }) {
  const counts = originsOf(call.tokens.prompt, call.number);
  return html`<ul class="origins">
    ${Object.entries(counts)
      .filter(([, number]) => number > 0)
      .map(([kind, number]) => html`<li key=${kind}><span class=${`swatch piece ${kind}`}>ab</span> ${counted(number, "token")} ${ORIGINS[kind]}</li>`)}
  </ul>`;
}
