-- References are unique at one provider, not over all. If many providers call their charges 1, 2, 3, finishing a
-- payment read all of the same name. The provider is in the index as the query writes it, so that no other index fits,
-- whatever the statistics say.
DROP INDEX jobs_one_payment_per_charge;
CREATE UNIQUE INDEX jobs_one_payment_per_charge ON jobs (provider_reference, (provider || '')) WHERE state = 'succeeded';
