// Asks the server that the page came from, and knows whether it answers.

const PATIENCE_MS = 12_000;

/** A refusal in the server's words; `status` 0: no answer at all. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Whether the server answers: `lastAnswer` in ms, `problem` in words while it does not. */
export const link = { lastAnswer: 0, problem: null, since: 0 };

export const get = (path, signal) => ask(path, { signal });

export const post = (path, body) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/** `parts` into an address, each quoted. */
export const path = (...parts) => `/api/v1/${parts.map(encodeURIComponent).join("/")}`;

/** What is given, as a query. */
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
    // Not relative to the page's own address, which may hold a name and a password: no browser fetches such a one.
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
  if (status === 401) return "This page is not signed in any more: load it again.";
  return typeof words === "string" && words !== "" ? words : `The server answered ${status}.`;
}

function answered() {
  link.lastAnswer = Date.now();
  link.problem = null;
}

function lost(problem) {
  if (link.problem === null) link.since = link.lastAnswer || Date.now();
  link.problem = problem;
}
