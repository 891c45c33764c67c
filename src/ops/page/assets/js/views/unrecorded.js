// What lies in queues and is in no ledger yet, as far as the counts tell.

/** By provider: payments in its queue that no worker has recorded. */
export function unrecorded(overview, wanted = "") {
  return (overview?.providers ?? [])
    .filter(({ name }) => wanted === "" || name === wanted)
    .map(({ name, unrecorded }) => ({ name, messages: unrecorded ?? 0 }))
    .filter(({ messages }) => messages > 0);
}
