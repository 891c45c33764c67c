-- The cut-off of a provider: the time of day until which its payments should be sent, and the time zone of that clock.
-- docs/configuration.md, `cutoff`. The CHECK knows no zone: the program knows them. The triggers of 0001 audit every
-- column of the row.
ALTER TABLE providers ADD COLUMN cutoff text COLLATE "C"
    CONSTRAINT cutoff_is_a_time_of_day_and_a_time_zone
        CHECK (cutoff ~ '^([01][0-9]|2[0-3]):[0-5][0-9] [A-Za-z][A-Za-z0-9_+/-]{0,62}$');
