// What lies in queues and is in no ledger yet, as far as the counts tell.

/** By provider: messages that are ready in its queue beyond those of payments that the ledger knows and that are due. */
export function unrecorded(overview, wanted = "") {
  const due = new Map((overview?.conservation ?? []).map((account) => [account.provider, account.due ?? 0]));
  return (overview?.providers ?? [])
    .filter(({ name }) => wanted === "" || name === wanted)
    .map(({ name, queued }) => ({ name, messages: Math.max(0, (queued ?? 0) - (due.get(name) ?? 0)) }))
    .filter(({ messages }) => messages > 0);
}
