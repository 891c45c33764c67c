// The server's time, as its answers tell it: ages on the page do not depend on this machine's clock.

let skewMs = 0;

export const serverNow = () => Date.now() + skewMs;

/** Notes what the server's clock said just now. */
export function heard(at) {
  const ms = Date.parse(at);
  if (Number.isFinite(ms)) skewMs = ms - Date.now();
}
