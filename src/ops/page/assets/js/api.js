// The client of the API: it calls the server of this page, and records whether it responds.

const PATIENCE_MS = 12_000;

/** An error response with the server's text; `status` 0 means no response. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** State of the connection: time of the last response in ms, and the problem while the server does not respond. */
export const link = { lastAnswer: 0, problem: null, since: 0 };

export const get = (path, signal) => ask(path, { signal });

export const post = (path, body) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/** The path of an API call; each part is encoded. */
export const path = (...parts) => `/api/v1/${parts.map(encodeURIComponent).join("/")}`;

/** A query string of the fields that have a value. */
export function query(fields) {
  const given = Object.entries(fields).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length === 0 ? "" : `?${new URLSearchParams(given)}`;
}

async function ask(url, options) {
  const limits = [AbortSignal.timeout(PATIENCE_MS)];
  if (options.signal) limits.push(options.signal);
  let answer;
  let text;
  try {
    // The page's own address may contain a name and a password, and browsers refuse to fetch relative to such a URL.
    answer = await fetch(new URL(url, location.origin), { ...options, signal: AbortSignal.any(limits), cache: "no-store", redirect: "error" });
    text = await answer.text();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    lost("The server cannot be reached");
    throw new ApiError(0, "The server cannot be reached.");
  }
  answered();
  if (answer.ok) return parsed(text) ?? {};
  throw new ApiError(answer.status, refusal(answer.status, parsed(text)?.error));
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function refusal(status, words) {
  if (status === 401) return "This page is no longer signed in: reload it.";
  return typeof words === "string" && words !== "" ? words : `The server responded with status ${status}.`;
}

function answered() {
  link.lastAnswer = Date.now();
  link.problem = null;
}

function lost(problem) {
  if (link.problem === null) link.since = link.lastAnswer || Date.now();
  link.problem = problem;
}
