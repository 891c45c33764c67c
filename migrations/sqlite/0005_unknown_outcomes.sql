-- Look-ups of payments with an unknown outcome, and one charge for each payment.

-- A look-up is a request like any other: it has a row, and it counts at the provider.
ALTER TABLE attempts ADD COLUMN kind TEXT NOT NULL DEFAULT 'charge'
    CONSTRAINT kind_is_charge_or_lookup CHECK (kind IN ('charge', 'lookup'));

ALTER TABLE jobs ADD COLUMN lookups INTEGER NOT NULL DEFAULT 0 CONSTRAINT lookups_is_0_or_more CHECK (lookups >= 0);
-- Whether a look-up without a result has allowed one more request, and whether that may have been sent.
ALTER TABLE jobs ADD COLUMN resend TEXT CONSTRAINT resend_is_granted_or_used CHECK (resend IN ('granted', 'used'));

-- A provider's reference is one charge: no two payments succeed by it.
CREATE UNIQUE INDEX jobs_one_payment_per_charge ON jobs (provider, provider_reference) WHERE state = 'succeeded';
