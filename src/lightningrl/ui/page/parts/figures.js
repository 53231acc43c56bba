// How are figures written? The same way everywhere: short, with a unit where there is one.

/** A number in at most `digits` significant digits: 0.2656, 12.4, 3,120, 1.2e-7; "–" if there is none. */
export function figure(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return minus(value.toExponential(digits - 1).replace(/\.?0*e\+?/, "e"));
  if (Number.isInteger(value) || size >= 1000) return minus(Math.round(value).toLocaleString("en"));
  return minus(String(Number(value.toPrecision(digits))));
}

/** A reward, with three decimals where it has any below 1, so that those in a column can be compared: 0.260, 1, 12.5. */
export function reward(value) {
  const plain = value === null || value === undefined || Number.isInteger(value) || !(Math.abs(value) >= 1e-3 && Math.abs(value) < 1);
  return plain ? figure(value) : minus(value.toFixed(3));
}

/** A share of 1 as a percentage. */
export function share(value) {
  return value === null || value === undefined ? "–" : `${figure(value * 100)} %`;
}

/** A count in few characters: 980, 12.3k, 4.5M. */
export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10_000) return value.toLocaleString("en");
  return value < 1e6 ? `${figure(value / 1e3)}k` : `${figure(value / 1e6)}M`;
}

/** Seconds as 0.12 s, 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${figure(seconds, seconds < 10 ? 2 : 3)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} d ${Math.floor((whole % 86_400) / 3600)} h`;
}

/** Seconds since then, roughly: 42 s, 3 min, 2 h, 5 d. */
export function roughly(seconds) {
  const [size, unit] = [[86_400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}

function minus(text) {
  return text.replaceAll("-", "−");
}

/** A tick of an axis whose ticks are `apart`: as many decimals as tell them apart. */
export function tick(value, apart) {
  if (value === 0 || apart < 1e-4 || Math.abs(value) >= 1e6) return figure(value);
  const decimals = Math.max(0, -Math.floor(Math.log10(apart) + 1e-9));
  return minus(value.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: decimals + 1 }));
}
