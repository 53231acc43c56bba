// Which colour does a sampled token get? Four scales; each says its words, its value, how strong, and its legend.
import { percent, signed } from "./digits.js";
import { figure } from "./figures.js";

const RARE = Math.log(100); // a probability of 1 % and less has the full colour
const CLIP = Math.log(1.2); // at least the usual clip range, so that small ratios look small

/** [largest size of the values, but at least `least`] */
function largest(values, least) {
  return values.reduce((most, value) => Math.max(most, Math.abs(value)), least);
}

/** `values` of a call's sampled tokens; `heat` from −1 to 1 with `bound`; `ticks` of the legend from left to right. */
export const SCALES = {
  logprob: {
    title: "probability",
    question: "How likely was each token? Dark: the model nearly chose another one.",
    values: (sampled) => sampled.logprobs,
    bound: () => RARE,
    heat: (value, bound) => Math.min(1, Math.max(0, -value / bound)),
    ticks: () => ["100 %", "32 %", "10 %", "3 %", "≤ 1 %"],
    write: (value) => percent(Math.exp(value)),
    diverging: false,
  },
  advantage: {
    title: "advantage",
    question: "Which way was each token pushed? Blue: more likely, orange: less likely.",
    values: (sampled) => sampled.advantages,
    bound: (values) => largest(values, 1),
    heat: (value, bound) => value / bound,
    ticks: (bound) => [signed(-bound), "0", signed(bound)],
    write: signed,
    diverging: true,
  },
  ratio: {
    title: "ratio",
    question: "What did the step do? Blue: more likely after it, orange: less likely.",
    values: (sampled) => sampled.ratios,
    bound: (values) => largest(values.map((ratio) => Math.log(Math.max(ratio, 1e-9))), CLIP),
    heat: (value, bound) => Math.log(Math.max(value, 1e-9)) / bound,
    ticks: (bound) => [`× ${figure(Math.exp(-bound))}`, "× 1", `× ${figure(Math.exp(bound))}`],
    write: (value) => `× ${figure(value)}`,
    diverging: true,
  },
  entropy: {
    title: "entropy",
    question: "Where was the model undecided? Dark: many tokens were possible.",
    values: (sampled) => sampled.entropies,
    bound: (values) => largest(values, 1),
    heat: (value, bound) => value / bound,
    ticks: (bound) => ["0 nats", figure(bound / 2), figure(bound)],
    write: (value) => `${figure(value)} nats`,
    diverging: false,
  },
};

/** The scale that an address names; else what the step did, if that was recorded, or how likely each token was. */
export function scaleNamed(name, tokens) {
  if (name in SCALES) return name;
  return tokens.sampled.ratios === null ? "logprob" : "ratio";
}

/** {tone, share}: the CSS class of a token and how much of its colour it gets, from 0 to 1. */
export function toneOf(scale, value, bound) {
  if (value === null || value === undefined || Number.isNaN(value)) return { tone: "plain", share: 0 };
  const heat = Math.max(-1, Math.min(1, scale.heat(value, bound)));
  if (!scale.diverging) return { tone: "heat", share: heat };
  return { tone: heat < 0 ? "down" : "up", share: Math.abs(heat) };
}

/** The style of a token: how much of its colour is mixed in, at most as much as leaves the text readable. */
export function strength(share) {
  return { "--share": `${Math.round(share * 42)}%` };
}

/** The reason why a scale has nothing to show; null if it has. */
export function whyNothing(name, tokens) {
  if (SCALES[name].values(tokens.sampled) !== null) return null;
  const kept = { advantage: "advantages", entropy: "entropies", ratio: "ratios" }[name];
  return tokens.why_not[kept] ?? "it was not recorded";
}
