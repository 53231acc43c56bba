// Dark or light? As the system says, until somebody chooses; the choice is kept in this browser.
import { useEffect, useState } from "./vendor/preact.js";

const NAME = "lightningrl-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

function remembered() {
  try {
    return localStorage.getItem(NAME);
  } catch {
    return null; // storage is off, or the page is a file
  }
}

function show(theme) {
  if (theme === null) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  for (const listener of listeners) listener(themeNow());
}

/** "dark" or "light". */
export function themeNow() {
  return document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
}

export function switchTheme() {
  const theme = themeNow() === "dark" ? "light" : "dark";
  try {
    localStorage.setItem(NAME, theme);
  } catch {
    // it holds until the page is closed
  }
  show(theme);
}

/** The theme; what draws with colours of its own (a canvas) is drawn again when it changes. */
export function useTheme() {
  const [theme, setTheme] = useState(themeNow);
  useEffect(() => {
    listeners.add(setTheme);
    return () => listeners.delete(setTheme);
  }, []);
  return theme;
}

/** The value of a colour of style.css, for a canvas: `colour("--accent")`. */
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

dark.addEventListener("change", () => show(remembered()));
show(remembered());
