//! The storages and formats that a build adds to those of the facade.

use std::fmt;
use std::sync::Arc;

use dcp::StorageRegistry;
use dcp::checkpoint::Format;
use dcp::core::format::{CheckpointFormat, FormatRegistry};

type Register = dyn Fn(&mut StorageRegistry) + Send + Sync;

/// What the command recognizes and opens.
pub(crate) struct Plugins {
    /// Each registers storages after those of the facade.
    pub(crate) storages: Vec<Box<Register>>,
    formats: FormatRegistry,
    targets: Vec<&'static str>,
}

impl Default for Plugins {
    fn default() -> Self {
        let (storages, formats) = (Vec::new(), dcp::default_formats());
        Self { storages, formats, targets: Vec::new() }
    }
}

impl Plugins {
    /// Adds a format; it replaces one of the same name.
    pub(crate) fn add_format(&mut self, format: Arc<dyn CheckpointFormat>) {
        let name = format.info().name;
        self.targets.retain(|known| *known != name);
        if format.target().is_some() && name.parse::<Format>().is_err() {
            self.targets.push(name);
        }
        self.formats.register(format);
    }

    /// The names of added formats that checkpoints can be written in.
    pub(crate) fn targets(&self) -> &[&'static str] {
        &self.targets
    }

    /// All formats.
    pub(crate) fn formats(&self) -> FormatRegistry {
        self.formats.clone()
    }

    /// Registers the added storages.
    pub(crate) fn register(&self, storages: &mut StorageRegistry) {
        self.storages.iter().for_each(|register| register(storages));
    }
}

impl fmt::Debug for Plugins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugins")
            .field("formats", &self.formats)
            .field("targets", &self.targets)
            .finish_non_exhaustive()
    }
}
