//! Payment providers over HTTP.
