// Formats of numbers, ages and amounts. A missing value is a dash. `instants.js` has the formats of instants.

import { serverNow } from "./clock.js";

export { clock, hourMinute, when } from "./instants.js";

export const DASH = "–";
/** Keeps a number and its unit on one line. */
const NBSP = "\u00a0";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ONE = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const FINE = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
const PERCENT = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 0 });

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export const count = (value) => (missing(value) ? DASH : WHOLE.format(value));
export const percent = (share) => (missing(share) || !Number.isFinite(share) ? DASH : PERCENT.format(share));
export const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many}`;

/** Requests per second. */
export function rate(value) {
  if (missing(value)) return DASH;
  if (value === 0) return "0/s";
  return `${value >= 1000 ? WHOLE.format(value) : value >= 1 ? ONE.format(value) : FINE.format(value)}/s`;
}

const UNITS = [
  ["d", 86_400_000],
  ["h", 3_600_000],
  ["min", 60_000],
  ["s", 1_000],
];

/** `2 min 5 s`: the two greatest units; below ten seconds with a decimal. */
export function duration(ms) {
  if (missing(ms)) return DASH;
  if (ms < 1_000) return `${WHOLE.format(Math.max(0, ms))}${NBSP}ms`;
  if (ms < 10_000) return `${trimmed(ms / 1_000)}${NBSP}s`;
  const rounded = Math.round(ms / 1_000) * 1_000;
  const first = UNITS.findIndex(([, size]) => rounded >= size);
  const [unit, size] = UNITS[first];
  const [lesser, lesserSize] = UNITS[first + 1] ?? [];
  const rest = lesser ? Math.floor((rounded % size) / lesserSize) : 0;
  const head = `${WHOLE.format(Math.floor(rounded / size))}${NBSP}${unit}`;
  return rest > 0 ? `${head} ${rest}${NBSP}${lesser}` : head;
}

const trimmed = (value) => ONE.format(value).replace(/\.0$/, "");

/** A limit as commands and the API write it: `100/1s`; without a window it counts requests in flight. */
export function rateSpec(requests, windowMs) {
  if (!windowMs) return `${requests} at once`;
  const [unit, size] = [["d", 86_400_000], ["h", 3_600_000], ["m", 60_000], ["s", 1_000], ["ms", 1]].find(
    ([, size]) => windowMs % size === 0 && windowMs >= size,
  ) ?? ["ms", 1];
  return `${requests}/${windowMs / size}${unit}`;
}

export const since = (at) => (at ? serverNow() - Date.parse(at) : undefined);
export const ago = (at) => (at ? duration(Math.max(0, coarse(since(at)))) : DASH);
/** An age in words. */
export const agoWords = (at) => (!at ? DASH : coarse(since(at)) < 1_000 ? "just now" : `${ago(at)} ago`);
/** A sentence begins with a capital. */
export const sentence = (words) => (words ? words.charAt(0).toUpperCase() + words.slice(1) : "");
const coarse = (ms) => (ms < 1_000 ? 0 : Math.floor(ms / 1_000) * 1_000);

// Digits after the decimal point by ISO 4217; other currencies have two. The browsers' table differs: it is that of
// everyday use.
const EXPONENTS = {
  0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
  3: "BHD IQD JOD KWD LYD OMR TND",
  4: "CLF UYW",
};
const EXPONENT = new Map(Object.entries(EXPONENTS).flatMap(([n, list]) => list.split(" ").map((c) => [c, Number(n)])));

export const exponent = (currency) => EXPONENT.get(currency) ?? 2;

/** Minor units as an amount: `EUR 12.50`. */
export function money(minor, currency) {
  if (missing(minor)) return DASH;
  const digits = exponent(currency);
  const format = new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return `${currency}${NBSP}${format.format(minor / 10 ** digits)}`;
}
