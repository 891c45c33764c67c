// Instants as the page shows them: in this browser's time zone or in UTC, always with the zone's name, and with the
// date where it is not today's. The tooltip has the full instant in UTC, as logs and the API write it.

import { serverNow } from "./clock.js";
import { h } from "./dom.js";

const KEY = "zone";
const DASH = "–";
const NBSP = "\u00a0";
/** Each names other zones by letters: `CET`, `EST`, `IST`. The first that does is used. */
const NAMING = ["en-GB", "en-US", "en-AU", "en-IN", "en-CA", "en-NZ", "en-ZA"];

let utc = stored();
let formats = make();

function stored() {
  try {
    return localStorage.getItem(KEY) === "utc";
  } catch {
    // Storage is forbidden: the choice lasts as long as the page.
    return false;
  }
}

function make() {
  const timeZone = utc ? "UTC" : undefined;
  const format = (locale, options) => new Intl.DateTimeFormat(locale, { timeZone, ...options });
  return {
    time: format("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" }),
    day: format("en-GB", { day: "numeric", month: "short" }),
    date: format("en-GB", { day: "numeric", month: "short", year: "numeric" }),
    zones: NAMING.map((locale) => format(locale, { hour: "numeric", timeZoneName: "short" })),
    names: new Map(),
  };
}

/** Switches between this browser's zone and UTC, for this page and for later ones. */
export function switchZone() {
  utc = !utc;
  formats = make();
  try {
    if (utc) localStorage.setItem(KEY, "utc");
    else localStorage.removeItem(KEY);
  } catch {
    // See `stored`.
  }
  document.dispatchEvent(new Event("zonechange"));
}

export const inUtc = () => utc;

/** The name of the zone at an instant: `CET` in winter, `CEST` in summer; `UTC+5:45` where no language has one. */
export function zoneName(at = serverNow()) {
  if (utc) return "UTC";
  const date = new Date(at);
  const offset = date.getTimezoneOffset();
  const known = formats.names.get(offset);
  if (known) return known;
  const names = formats.zones.map((format) => format.formatToParts(date).find(({ type }) => type === "timeZoneName")?.value ?? "");
  const name = (names.find((words) => !/^GMT[+-]/.test(words)) ?? names[0]).replace(/^GMT(?=[+-])/, "UTC");
  formats.names.set(offset, name);
  return name;
}

const zoned = (time, at) => `${time}${NBSP}${zoneName(at)}`;

/** `14:03:21 CET`. */
export const clock = (at) => (at ? zoned(formats.time.format(new Date(at)), at) : DASH);

/** `14:03`, for an axis; the readout beside it has the zone. */
export const hourMinute = (at) => formats.time.format(new Date(at)).slice(0, 5);

/** `27 Nov`, for an axis. */
export const dayMonth = (at) => formats.day.format(new Date(at));

/** The date before the time, unless it is today's; with the year, unless it is this year's. */
function dated(at, words) {
  const [date, today] = [new Date(at), new Date(serverNow())];
  const full = formats.date.format(date);
  if (full === formats.date.format(today)) return words;
  return `${full.slice(-4) === formats.date.format(today).slice(-4) ? formats.day.format(date) : full}, ${words}`;
}

/** Time of day, with the date when it is another day's. */
export const when = (at) => (at ? dated(at, clock(at)) : DASH);

/** As `when`, to the minute. */
export const about = (at) => (at ? dated(at, zoned(hourMinute(at), at)) : DASH);

const iso = (at) => new Date(at).toISOString();

/** An instant as an element: its words, and the full instant for programs and in the tooltip. */
export const instant = (at, words = when(at)) => (at ? h("time", { datetime: iso(at), title: iso(at) }, words) : DASH);

/** The server's texts have times in UTC, with the date unless it is today's there. */
const WRITTEN = /(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d:\d\d) UTC/g;

/** A text of the server in the chosen zone. */
export function inZone(text) {
  if (utc || !text) return text;
  const today = iso(serverNow()).slice(0, 10);
  return String(text).replace(WRITTEN, (_, day, time) => when(`${day ?? today}T${time}Z`));
}
