-- The reference first: whoever looks for the payment of a charge has no other index that would do, whatever the statistics
-- say.
DROP INDEX jobs_one_payment_per_charge;
CREATE UNIQUE INDEX jobs_one_payment_per_charge ON jobs (provider_reference, provider) WHERE state = 'succeeded';
