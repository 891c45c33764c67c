//! The strict provider for rehearsals.
