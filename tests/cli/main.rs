//! The commands, against engines in memory, and the program itself as a process.

mod check;
mod enqueue;
mod fakes;
mod process;
mod providers;
