//! The save and load protocols over the traits of dcp-core.
