-- The text fields of a job are checked when they are written, and not at each of its steps: PostgreSQL evaluates all
-- CHECKs of a table at every update, and these five take longer than the update. The CHECKs of a domain run for its
-- column alone. The tables are rewritten, because no release has them yet (rule 7 of migrations/README.md).

CREATE DOMAIN job_id AS text
    CONSTRAINT id_is_1_to_64_of_letters_digits_underscore_dash CHECK (VALUE ~ '^[A-Za-z0-9_-]{1,64}$');
CREATE DOMAIN job_provider AS text
    CONSTRAINT job_provider_is_a_provider_name CHECK (VALUE ~ '^[a-z0-9][a-z0-9_-]{0,62}$');
CREATE DOMAIN job_idempotency_key AS text
    CONSTRAINT idempotency_key_is_1_to_64_of_letters_digits_underscore_dash CHECK (VALUE ~ '^[A-Za-z0-9_-]{1,64}$');
CREATE DOMAIN job_currency AS text
    CONSTRAINT currency_is_3_capital_letters CHECK (VALUE ~ '^[A-Z]{3}$');
CREATE DOMAIN job_account AS text
    CONSTRAINT job_account_is_1_to_64_of_letters_digits_underscore_dash CHECK (VALUE ~ '^[A-Za-z0-9_-]{1,64}$');

ALTER TABLE jobs
    DROP CONSTRAINT id_is_1_to_64_of_letters_digits_underscore_dash,
    DROP CONSTRAINT job_provider_is_a_provider_name,
    DROP CONSTRAINT idempotency_key_is_1_to_64_of_letters_digits_underscore_dash,
    DROP CONSTRAINT currency_is_3_capital_letters,
    DROP CONSTRAINT job_account_is_1_to_64_of_letters_digits_underscore_dash,
    ALTER COLUMN id TYPE job_id,
    ALTER COLUMN provider TYPE job_provider,
    ALTER COLUMN idempotency_key TYPE job_idempotency_key,
    ALTER COLUMN currency TYPE job_currency,
    ALTER COLUMN account TYPE job_account;
