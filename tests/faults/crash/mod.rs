//! The crash matrix: one crash at a named place, or one kind of event at a time.
//!
//! The random run (the rest of tests/faults) finds faults that nobody thought of. This one shows that each known fault
//! really occurs and is survived. Its verdict is shown to find what is planted.

mod cell;
mod engines;
mod events;
mod matrix;
mod trap;
mod verdict;
