//! The crash matrix: one crash at a named place, one seeded bug, or one kind of event at a time.
//!
//! The random run (the rest of tests/faults) finds faults that nobody thought of. This one shows that each known fault
//! really occurs and is survived, and that the oracles notice when it is not.

mod bugs;
mod cell;
mod engines;
mod events;
mod matrix;
mod trap;
mod verdict;
