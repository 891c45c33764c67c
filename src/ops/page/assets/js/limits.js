// The limits of a provider as they are written: `600/1m`. A mean rate per second would hide that bursts are faster.

import { DASH, rate, rateSpec } from "./format.js";

/** A limit as its row has it. */
export const written = ({ max_requests: requests, window_ms: window }) => rateSpec(requests, window);

const perSecond = ({ max_requests: requests, window_ms: window }) => (window ? (requests * 1_000) / window : Number.MAX_VALUE);

/** The limit with the lowest mean rate among those that every charge meets; undefined without one. */
function tightestLimit(limits) {
  const every = ({ enabled, shadow, scope, applies_to: calls }) => enabled !== false && !shadow && (scope ?? "provider") === "provider" && calls !== "lookup";
  return (limits ?? []).filter(every).sort((a, b) => perSecond(a) - perSecond(b))[0];
}

/** The tightest limit of a provider in words. */
export function tightestWords({ limits }) {
  const limit = tightestLimit(limits);
  return limit ? written(limit) : DASH;
}

/** A recorded mean rate: as the tightest limit is written if that has it, or else as a mean. */
export function limitWas(mean, { limits }) {
  if (mean === null || mean === undefined) return DASH;
  const limit = tightestLimit(limits);
  const isSame = limit && Math.abs(perSecond(limit) - mean) <= mean * 1e-6;
  return isSame ? written(limit) : `${rate(mean)} on average`;
}
