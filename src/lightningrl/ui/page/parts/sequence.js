// In which pieces is a token sequence drawn? Neighbours of one origin share a piece, so that long prompts paint fast.
import { marked } from "./plain.js";

const SPECIAL = /^<[|｜/]?[\w｜▁|.-]+[|｜]?>$/; // <|im_end|>, <s>, </tool_call>: control tokens of chat templates
const HISTORY = 40; // shorter histories are not worth folding
const LONG = 900; // of a longer text, only the first and last tokens are shown
const FIRST = 200;
const LAST = 400;

/** The text of a token; without a tokenizer, its id. */
export function textOf(part, index) {
  return part.texts === null ? `[${part.ids[index]}]` : part.texts[index];
}

export function isSpecial(text) {
  return SPECIAL.test(text);
}

/**
 * The prompt as [{from, to, origin, call, special, text, offsets, fold}]. `offsets[i]` is where token `from + i` begins
 * in `text`; `fold` numbers the folded stretch that the piece belongs to, or is null.
 */
export function piecesOf(prompt, call) {
  const folds = foldsOf(prompt, call);
  const cuts = new Set(folds.flatMap((fold) => [fold.from, fold.to]));
  const pieces = [];
  for (const run of prompt.runs) {
    let piece = null;
    for (let at = run.from; at < run.to; at += 1) {
      const text = textOf(prompt, at);
      const special = isSpecial(text);
      if (piece === null || special || piece.special || cuts.has(at)) {
        piece = { from: at, to: at, origin: run.origin, call: run.call, special, text: "", offsets: [], fold: foldOf(folds, at) };
        pieces.push(piece);
      }
      piece.offsets.push(piece.text.length);
      piece.text += marked(text);
      piece.to = at + 1;
    }
  }
  return { pieces, folds };
}

/** What is folded at first: the history that an earlier call has read already, and the middle of a long new text. */
function foldsOf(prompt, call) {
  const total = prompt.ids.length;
  const fresh = prompt.runs.find((run) => run.call === call && run.origin !== "sampled")?.from ?? total;
  const folds = [];
  if (fresh >= HISTORY) folds.push({ from: 0, to: fresh, history: true });
  const begin = folds.length ? fresh : 0;
  if (total - begin > LONG) folds.push({ from: begin + FIRST, to: total - LAST, history: false });
  return folds;
}

function foldOf(folds, at) {
  const found = folds.findIndex((fold) => fold.from <= at && at < fold.to);
  return found < 0 ? null : found;
}

/** How many tokens of each origin: {rendered, earlier, sampled, inserted}; `earlier` was rendered for an earlier call. */
export function originsOf(prompt, call) {
  const counts = { rendered: 0, earlier: 0, sampled: 0, inserted: 0 };
  for (const run of prompt.runs) counts[kindOf(run, call)] += run.to - run.from;
  return counts;
}

/** The name of a run's colour. */
export function kindOf(run, call) {
  return run.origin === "rendered" && run.call !== call ? "earlier" : run.origin;
}

/** Who brought a token in, in words. */
export const ORIGINS = {
  rendered: "rendered for this call",
  earlier: "rendered for an earlier call",
  sampled: "sampled in an earlier call",
  inserted: "inserted between them",
};

/** The token at a place in a piece's text. */
export function tokenAt(piece, offset) {
  let low = 0;
  let high = piece.offsets.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (piece.offsets[middle] <= offset) low = middle;
    else high = middle - 1;
  }
  return piece.from + low;
}
