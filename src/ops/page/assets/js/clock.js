// The server's time, taken from its responses, so that ages on the page do not depend on this machine's clock.

let skewMs = 0;

export const serverNow = () => Date.now() + skewMs;

/** Records the server's time of a response that has just arrived. */
export function heard(at) {
  const ms = Date.parse(at);
  if (Number.isFinite(ms)) skewMs = ms - Date.now();
}
