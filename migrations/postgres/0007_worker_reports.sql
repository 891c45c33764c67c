-- The report of each running worker, every two seconds: one row for each process, so that any process can show all.
-- Only pages and `status` use these rows; a deleted row comes back.

CREATE TABLE worker_reports (
    id text NOT NULL PRIMARY KEY
        CONSTRAINT worker_id_is_1_to_64_of_letters_digits_underscore_dash CHECK (id ~ '^[A-Za-z0-9_-]{1,64}$'),
    host text NOT NULL CONSTRAINT host_is_at_most_255_characters CHECK (char_length(host) <= 255),
    pid bigint NOT NULL CONSTRAINT pid_is_0_or_more CHECK (pid >= 0),
    version text NOT NULL CONSTRAINT version_is_at_most_64_characters CHECK (char_length(version) <= 64),
    started_at timestamptz NOT NULL,
    -- By the database's clock, like every instant here: the clocks of workers may differ.
    reported_at timestamptz NOT NULL,
    -- The format of `report`; a program that knows only older formats ignores the row.
    format bigint NOT NULL CONSTRAINT format_is_1_or_more CHECK (format >= 1),
    report jsonb NOT NULL
);
