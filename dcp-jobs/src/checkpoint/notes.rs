//! The notes of a job while it works.

use std::fmt;
use std::sync::Arc;

type Listener = Arc<dyn Fn(&str) + Send + Sync>;

/// The notes of a job, each of which the listener of its opener gets at once.
#[derive(Clone, Default)]
pub struct Notes {
    listener: Option<Listener>,
    said: Vec<String>,
}

impl Notes {
    pub(crate) fn listened(listener: Listener) -> Self {
        Self { listener: Some(listener), said: Vec::new() }
    }

    /// Nothing said yet, to the same listener.
    pub(crate) fn begin(&self) -> Self {
        Self { listener: self.listener.clone(), said: Vec::new() }
    }

    /// No notes yet, and no listener.
    pub(crate) fn unheard() -> Self {
        Self::default()
    }

    /// Adds a note.
    pub fn say(&mut self, text: impl Into<String>) {
        let text = text.into();
        if let Some(listener) = &self.listener {
            listener(&text);
        }
        self.said.push(text);
    }

    /// All that was said.
    pub(crate) fn into_said(self) -> Vec<String> {
        self.said
    }
}

impl fmt::Debug for Notes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notes").field("said", &self.said).finish_non_exhaustive()
    }
}
