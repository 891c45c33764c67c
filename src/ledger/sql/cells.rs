//! The cells of a row, read as the types that the schema promises.
//!
//! A cell of another type, or out of range, is a fault that says what is wrong and never names the value.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::domain::commit_memory::HoldCause;
use crate::domain::disposition::Resend;
use crate::domain::job::{ContentHash, FlowClass, Identifier};
use crate::domain::outcome::FinalState;
use crate::domain::provider::ProviderName;
use crate::domain::time::EpochMs;
use crate::ledger::backlog::BlockedReason;
use crate::ledger::operator::DatabaseTime;
use crate::ledger::provider_row::Object;

/// A cell, with its text or bytes as they lie in the driver's row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SqlValue<'r> {
    Null,
    Int(i64),
    Real(f64),
    Bool(bool),
    Text(&'r str),
    Bytes(&'r [u8]),
}

/// What is wrong with a cell.
pub type Fault = Cow<'static, str>;

/// A type that a cell is read as.
pub trait FromCell: Sized {
    /// The end of the column's name, after the field's.
    const SUFFIX: &'static str = "";

    fn from_cell(cell: SqlValue<'_>) -> Result<Self, Fault>;
}

impl<T: FromCell> FromCell for Option<T> {
    const SUFFIX: &'static str = T::SUFFIX;

    fn from_cell(cell: SqlValue<'_>) -> Result<Self, Fault> {
        if cell == SqlValue::Null { Ok(None) } else { T::from_cell(cell).map(Some) }
    }
}

/// A type with cells of its own.
macro_rules! stored_as {
    ($type:ty, $fault:literal, $($cell:pat => $value:expr),+) => {
        impl FromCell for $type {
            fn from_cell(cell: SqlValue<'_>) -> Result<Self, Fault> {
                match cell {
                    $($cell => Ok($value),)+
                    SqlValue::Null => Err("is NULL".into()),
                    _ => Err($fault.into()),
                }
            }
        }
    };
}

stored_as!(i64, "is not an integer", SqlValue::Int(value) => value);
stored_as!(f64, "is not a number", SqlValue::Real(value) => value);
stored_as!(Vec<u8>, "is not a byte string", SqlValue::Bytes(value) => value.to_vec());
stored_as!(Bytes, "is not a byte string", SqlValue::Bytes(value) => Bytes::copy_from_slice(value));
// SQLite stores 0 and 1.
stored_as!(bool, "is not a boolean", SqlValue::Bool(value) => value, SqlValue::Int(0) => false, SqlValue::Int(1) => true);

/// The text of a cell.
pub fn text(cell: SqlValue<'_>) -> Result<&str, Fault> {
    match cell {
        SqlValue::Text(text) => Ok(text),
        SqlValue::Null => Err("is NULL".into()),
        _ => Err("is not text".into()),
    }
}

/// A type that is made of a text; `None` has this fault.
macro_rules! made_of_text {
    ($type:ty, $make:expr, $fault:literal) => {
        impl FromCell for $type {
            fn from_cell(cell: SqlValue<'_>) -> Result<Self, Fault> {
                text(cell).and_then(|text| $make(text).ok_or($fault.into()))
            }
        }
    };
}

made_of_text!(String, |text: &str| Some(text.to_owned()), "");
made_of_text!(Arc<str>, |text: &str| Some(text.into()), "");
made_of_text!(Object, |text| serde_json::from_str(text).ok(), "is not a JSON object");
made_of_text!(Vec<serde_json::Value>, |text| serde_json::from_str(text).ok(), "is not a JSON array");
made_of_text!(FinalState, FinalState::from_name, "is not final");
made_of_text!(HoldCause, HoldCause::from_name, "has no known value");
made_of_text!(BlockedReason, BlockedReason::from_code, "has no known value");

/// A type that is made of a stored one; `None` has this fault.
macro_rules! made_of {
    ($stored:ty => $type:ty, $make:expr, $fault:literal $(, $suffix:literal)?) => {
        impl FromCell for $type {
            $(const SUFFIX: &'static str = $suffix;)?

            fn from_cell(cell: SqlValue<'_>) -> Result<Self, Fault> {
                <$stored>::from_cell(cell).and_then(|value| $make(value).ok_or($fault.into()))
            }
        }
    };
}

made_of!(i64 => u8, |value| u8::try_from(value).ok(), "is out of range");
made_of!(i64 => u16, |value| u16::try_from(value).ok(), "is out of range");
made_of!(i64 => u32, |value| u32::try_from(value).ok(), "is out of range");
made_of!(i64 => u64, |value| u64::try_from(value).ok(), "is negative");
made_of!(u8 => FlowClass, FlowClass::from_number, "is not 0 to 10");
made_of!(i64 => EpochMs, instant, "is not an instant of the years 1 to 9999", "_ms");
made_of!(EpochMs => DatabaseTime, |at: EpochMs| Some(DatabaseTime(at.0)), "", "_ms");
made_of!(i64 => Duration, duration, "is computed from an instant that is not finite", "_ms");
made_of!(Vec<u8> => ContentHash, |bytes: Vec<u8>| bytes.try_into().ok().map(ContentHash), "is not 32 bytes");
made_of!(Option<String> => Resend, |name: Option<String>| Resend::from_name(name.as_deref()), "has no known value");

fn instant(ms: i64) -> Option<EpochMs> {
    Some(EpochMs(ms)).filter(|at| at.is_writable())
}

/// More than lies between any two instants.
const SPAN_MAX_MS: u64 = 1_000_000_000_000_000;

/// A negative number (the database's clock was set back) is zero.
fn duration(ms: i64) -> Option<Duration> {
    (ms.unsigned_abs() <= SPAN_MAX_MS).then(|| Duration::from_millis(u64::try_from(ms).unwrap_or(0)))
}

impl FromCell for Identifier {
    fn from_cell(cell: SqlValue<'_>) -> Result<Self, Fault> {
        Self::new(text(cell)?).map_err(|problem| problem.to_string().into())
    }
}

impl FromCell for ProviderName {
    fn from_cell(cell: SqlValue<'_>) -> Result<Self, Fault> {
        Self::new(text(cell)?).map_err(|problem| problem.to_string().into())
    }
}
