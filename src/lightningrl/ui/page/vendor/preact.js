// One import for the whole page: Preact, its hooks, and `html`, which makes elements from template strings.
import { h } from "./preact.mjs";
import htm from "./htm.mjs";

export { Component, Fragment, createContext, h, options, render } from "./preact.mjs";
export { useCallback, useContext, useEffect, useId, useLayoutEffect, useMemo, useReducer, useRef, useState } from "./hooks.mjs";
export const html = htm.bind(h);
