// How are advantages, probabilities and counts of things written? `figures.js` has the rest.
import { figure } from "./figures.js";

/** With its sign: "+1.25", "−0.5", "0". */
export function signed(value, digits = 3) {
  return value > 0 ? `+${figure(value, digits)}` : figure(value, digits);
}

/** A probability: "97 %", "3.6 %", "0.012 %". Never 0 or 100, which a sampled token cannot have. */
export function percent(probability) {
  const value = probability * 100;
  if (value > 99.95) return "> 99.9 %";
  if (value >= 99) return `${value.toFixed(1)} %`;
  return value < 0.001 ? "< 0.001 %" : `${Number(value.toPrecision(2))} %`;
}

/** counted(1, "call") → "1 call"; counted(1200, "call") → "1,200 calls". */
export function counted(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}
