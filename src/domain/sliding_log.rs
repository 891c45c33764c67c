//! The carousel.
