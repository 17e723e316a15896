//! The `Debug` output of saves and loads, without secrets of their URLs.

use std::fmt;

use dcp_core::text::without_secrets;

use super::{Load, Save};

impl fmt::Debug for Save {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Save")
            .field("url", &without_secrets(&self.url))
            .field("with", &self.with)
            .finish_non_exhaustive()
    }
}

impl<S: ?Sized> fmt::Debug for Load<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Load")
            .field("url", &without_secrets(&self.url))
            .field("mode", &self.mode)
            .field("with", &self.with)
            .finish_non_exhaustive()
    }
}
