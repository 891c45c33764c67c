-- The order of an account's payments. A claimed job of a lane that keeps it is marked: no later job of its account is
-- claimed while it is undecided and not in the backlog.
ALTER TABLE providers ADD COLUMN "order" text NOT NULL DEFAULT 'none'
    CONSTRAINT order_is_none_or_account CHECK ("order" IN ('none', 'account'));
ALTER TABLE jobs ADD COLUMN in_order boolean NOT NULL DEFAULT false;
