//! What is certain to happen: one crash at a named place, one seeded bug, one kind of event at a time.
//!
//! Refuses chance: the random run (the rest of tests/faults) finds what nobody thought of, this shows that each fault
//! that somebody did think of really occurs and is survived, and that the judges notice when it is not.

mod bugs;
mod cell;
mod engines;
mod events;
mod matrix;
mod trap;
