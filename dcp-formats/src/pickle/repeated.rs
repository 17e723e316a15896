//! Text that a pickle has very often.

/// A global or a constant, with its number once it was written.
#[derive(Debug)]
pub(crate) struct Repeated {
    pub(super) module: Option<&'static str>,
    pub(super) name: Box<str>,
    pub(super) memo: Option<u32>,
}

impl Repeated {
    /// A name to import.
    pub(crate) fn global(module: &'static str, name: &str) -> Self {
        Self { module: Some(module), name: name.into(), memo: None }
    }

    /// A string that is shared by value.
    pub(crate) fn constant(text: &str) -> Self {
        Self { module: None, name: text.into(), memo: None }
    }
}
