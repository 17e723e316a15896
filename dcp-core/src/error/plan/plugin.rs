//! Errors of plug-ins on their way through the contracts of this crate.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// An error of a plug-in's own type. It shows as that error.
///
/// Two are equal when they show the same text.
#[derive(Clone)]
pub struct PluginError(Arc<dyn Error + Send + Sync>);

impl PluginError {
    /// Keeps the error of a plug-in.
    #[must_use]
    pub fn new(error: impl Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(error))
    }

    /// The error, where it is of the type `E`.
    #[must_use]
    pub fn downcast_ref<E: Error + 'static>(&self) -> Option<&E> {
        self.0.downcast_ref()
    }

    pub(in crate::error) fn inner(&self) -> &(dyn Error + 'static) {
        &*self.0
    }
}

impl fmt::Debug for PluginError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for PluginError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for PluginError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

impl PartialEq for PluginError {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for PluginError {}
