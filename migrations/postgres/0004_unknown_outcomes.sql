-- Look-ups of payments with an unknown outcome, and one charge for each payment.

-- A look-up is a request like any other: it has a row, and it counts at the provider.
ALTER TABLE attempts ADD COLUMN kind text NOT NULL DEFAULT 'charge';
ALTER TABLE attempts ADD CONSTRAINT kind_is_charge_or_lookup CHECK (kind IN ('charge', 'lookup')) NOT VALID;

ALTER TABLE jobs ADD COLUMN lookups bigint NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD CONSTRAINT lookups_is_0_or_more CHECK (lookups >= 0) NOT VALID;
-- Whether a look-up without a result has allowed one more request, and whether that may have been sent.
ALTER TABLE jobs ADD COLUMN resend text;
ALTER TABLE jobs ADD CONSTRAINT resend_is_granted_or_used CHECK (resend IN ('granted', 'used')) NOT VALID;

-- A provider's reference is one charge: no two payments succeed by it. Built in place, because no release came before
-- this file.
CREATE UNIQUE INDEX jobs_one_payment_per_charge ON jobs (provider, provider_reference) WHERE state = 'succeeded';
