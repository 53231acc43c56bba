// Tests of the page's functions that need no browser. `test_page_functions.py` runs this file beside a copy of the page.
import assert from "node:assert/strict";
import { test } from "node:test";
import { branchesOf, placesOf, sharedLength } from "./page/parts/branching.js";
import { branched } from "./page/parts/calltree.js";
import { SCALES, toneOf, whyNothing } from "./page/parts/colours.js";
import { decoded } from "./page/address.js";
import { neededBy } from "./page/held.js";
import { percent, signed } from "./page/parts/digits.js";
import { reward } from "./page/parts/figures.js";
import { marked, visible, written } from "./page/parts/plain.js";
import { rangeOf } from "./page/parts/rewardbars.js";
import { originsOf, piecesOf, tokenAt } from "./page/parts/sequence.js";

const node = (id, parent, depth, members, reward, siblings = []) => ({ id, parent, depth, members, reward, siblings, answer: null });

/** A prompt of one-character tokens; `runs`: [[number of tokens, origin, call]]. */
function promptOf(...runs) {
  let from = 0;
  const made = runs.map(([size, origin, call]) => ({ from, to: (from += size), origin, call }));
  return { ids: Array(from).fill(7), texts: Array(from).fill("x"), runs: made };
}

test("characters that hide or turn text become visible", () => {
  const found = visible("a\u202eb\u200b\u{e0041}\nc");
  assert.deepEqual(found.map((part) => part.props?.children ?? part), ["a", "U+202E", "b", "U+200B", "", "U+E0041", "\nc"]);
  assert.equal(marked("a\n\u202e"), "a↵\n⟨U+202E⟩");
});

test("joiners of scripts and emoji stay as they are", () => {
  assert.equal(visible("👩\u200d🚀 می\u200cخواهم\n\t"), "👩\u200d🚀 می\u200cخواهم\n\t");
});

test("JSON breaks lines only where it must", () => {
  const long = "y".repeat(60);
  assert.equal(written({ a: [1, 2] }), '{"a":[1,2]}');
  assert.deepEqual(JSON.parse(written({ a: [1, 2], b: long })), { a: [1, 2], b: long });
  assert.equal(written({ a: [1, 2], b: long }).split("\n")[1], '  "a": [1,2],');
});

test("the pieces of a prompt cover each token once, cut where the origin changes", () => {
  const prompt = promptOf([3, "rendered", 1], [2, "sampled", 1], [4, "rendered", 2]);
  prompt.texts[6] = "<|im_end|>";
  const { pieces, folds } = piecesOf(prompt, 2);
  assert.deepEqual(folds, []);
  assert.deepEqual(pieces.map(({ from, to, special }) => [from, to, special]), [[0, 3, false], [3, 5, false], [5, 6, false], [6, 7, true], [7, 9, false]]);
  assert.deepEqual(originsOf(prompt, 2), { rendered: 4, earlier: 3, sampled: 2, inserted: 0 });
});

test("a history that was read before is folded, and the middle of a long new text", () => {
  const { folds, pieces } = piecesOf(promptOf([1000, "rendered", 1], [50, "sampled", 1], [2000, "rendered", 2]), 2);
  assert.deepEqual(folds, [{ from: 0, to: 1050, history: true }, { from: 1250, to: 2650, history: false }]);
  for (const piece of pieces) assert.equal(piece.fold, piece.from < 1050 ? 0 : piece.from >= 1250 && piece.to <= 2650 ? 1 : null);
});

test("a place in the text belongs to its token, marks included", () => {
  const prompt = promptOf([3, "rendered", 1]);
  prompt.texts = ["ab", "\n", "c"];
  const [piece] = piecesOf(prompt, 1).pieces;
  assert.equal(piece.text, "ab↵\nc");
  assert.deepEqual([0, 1, 2, 3, 4].map((offset) => tokenAt(piece, offset)), [0, 0, 1, 1, 2]);
});

test("without a tokenizer, ids are shown", () => {
  assert.equal(piecesOf({ ...promptOf([2, "rendered", 1]), texts: null }, 1).pieces[0].text, "[7][7]");
});

test("a token that is more likely after the step is blue, one that is less likely orange", () => {
  const { ratio, logprob } = SCALES;
  const bound = ratio.bound([0.5, 1, 2]);
  assert.deepEqual([2, 1, 0.5].map((value) => toneOf(ratio, value, bound)), [{ tone: "up", share: 1 }, { tone: "up", share: 0 }, { tone: "down", share: 1 }]);
  assert.equal(toneOf(logprob, Math.log(0.1), logprob.bound()).share.toFixed(6), "0.500000");
  assert.equal(toneOf(logprob, null, 1).tone, "plain");
});

test("nothing to show has a reason", () => {
  const tokens = { sampled: { logprobs: [-1], ratios: null }, why_not: { ratios: "they were not recorded" } };
  assert.equal(whyNothing("ratio", tokens), "they were not recorded");
  assert.equal(whyNothing("logprob", tokens), null);
});

test("rollouts part where their answers differ, best first", () => {
  const tree = branchesOf([node("a", null, 0, ["1", "2"], 0.5), node("b", "a", 1, ["1"], 0), node("c", "a", 1, ["2"], 1)]);
  assert.deepEqual(tree.map((branch) => branch.nodes.map(({ id }) => id)), [["a"]]);
  assert.deepEqual(tree[0].below.map((branch) => branch.nodes[0].id), ["c", "b"]);
});

test("in a deep tree, calls in a row are one branch", () => {
  const chain = Array.from({ length: 6 }, (_, at) => node(`n${at}`, at ? `n${at - 1}` : null, at, ["1"], 1));
  assert.deepEqual(branchesOf(chain).map((branch) => branch.nodes.length), [6]);
});

test("a place with siblings begins a branch, also if all of them answered the same", () => {
  const chain = Array.from({ length: 6 }, (_, at) => node(`n${at}`, at ? `n${at - 1}` : null, at, ["1", "2"], 1, at === 4 ? ["1", "2"] : []));
  const [first] = branchesOf(chain);
  assert.deepEqual([first.nodes.length, first.below.map((branch) => branch.nodes.length)], [4, [2]]);
});

test("branches of one place are told together", () => {
  const found = placesOf([{ call: 2, rollout: "a" }, { call: 3, rollout: "b" }, { call: 2, rollout: "c" }]);
  assert.deepEqual(found.map(({ call, branches }) => [call, branches.map(({ rollout }) => rollout)]), [[2, ["a", "c"]], [3, ["b"]]]);
});

test("what answers share ends with a word", () => {
  assert.equal(sharedLength(["state = 'lost'", "state = 'LOST'"]), "state = ".length);
  assert.equal(sharedLength(["one two", "one two three"]), "one two".length);
  assert.equal(sharedLength(["same", "same"]), 4);
  assert.equal(sharedLength(["alone"]), 0);
});

test("a call stands below the one that it continues; further branches are moved to the right", () => {
  const calls = [[1, null], [2, 1], [3, 1], [4, 2], [5, null]].map(([number, parent]) => ({ number, parent }));
  assert.deepEqual(branched(calls).map(({ call, depth }) => [call.number, depth]), [[1, 0], [3, 1], [2, 0], [4, 0], [5, 0]]);
});

test("ranges of rewards may be open", () => {
  assert.deepEqual(["0..0.5", "1", "..0.5", "0.2..", "-1..0"].map(rangeOf), [[0, 0.5], [1, 1], [-Infinity, 0.5], [0.2, Infinity], [-1, 0]]);
  assert.equal(rangeOf("much"), null);
  assert.equal(rangeOf(undefined), null);
});

test("figures have the digits that matter", () => {
  assert.deepEqual([0.99999, 0.5, 0.0362, 0.000001].map(percent), ["> 99.9 %", "50 %", "3.6 %", "< 0.001 %"]);
  assert.deepEqual([1.25, -0.5, 0].map((value) => signed(value)), ["+1.25", "−0.5", "0"]);
});

test("rewards of a column have three decimals", () => {
  assert.deepEqual([0.26, 0.187, 0.2656, -0.5, 0, 1, 12.5, 1.5e-5, null].map(reward), ["0.260", "0.187", "0.266", "−0.500", "0", "1", "12.5", "1.5e−5", "–"]);
});

test("a view of an exported page needs the answer that it asks for first", () => {
  assert.equal(neededBy("#/"), "/api/runs");
  assert.equal(neededBy("#/run/a%20b/settings"), "/api/runs/a%20b");
  assert.equal(neededBy("#/run/r/rollout/x%2Fy/call/2?attempt=1&color=ratio"), "/api/runs/r/rollouts/x%2Fy/calls/2?attempt=1");
  assert.equal(neededBy("#/run/r/rollouts?sort=-reward"), "/api/runs/r/rollouts?sort=-reward&limit=100");
  assert.equal(neededBy("#/compare?runs=a,b"), null);
});

test("a stray percent sign in an address stays as it is", () => {
  assert.deepEqual(["a%20b", "a%b"].map(decoded), ["a b", "a%b"]);
});
