//! The suite finds what it is meant to find: storages that each break one promise.
