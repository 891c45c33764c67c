//! What a call for permits says.
