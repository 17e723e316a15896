//! Geometry and policy: save and load planners, flattening, sharding arithmetic, dedup and validation.
