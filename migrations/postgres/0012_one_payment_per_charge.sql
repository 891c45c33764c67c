-- The reference comes first: a search for the payment of a charge has no other index that fits, whatever the statistics
-- say.
DROP INDEX jobs_one_payment_per_charge;
CREATE UNIQUE INDEX jobs_one_payment_per_charge ON jobs (provider_reference, provider) WHERE state = 'succeeded';
