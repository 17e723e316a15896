//! State dicts: values, and the paths of nested ones.

pub mod path;
pub mod value;
