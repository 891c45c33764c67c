// Payments that are in queues and not in the ledger yet, by the counts of the overview.

/** Per provider, the payments in its queue that no worker has recorded. */
export function unrecorded(overview, wanted = "") {
  return (overview?.providers ?? [])
    .filter(({ name }) => wanted === "" || name === wanted)
    .map(({ name, unrecorded }) => ({ name, messages: unrecorded ?? 0 }))
    .filter(({ messages }) => messages > 0);
}
