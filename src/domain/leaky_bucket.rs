//! The leaky bucket.
