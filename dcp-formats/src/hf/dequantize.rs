//! Block-scaled weights as plain numbers.
