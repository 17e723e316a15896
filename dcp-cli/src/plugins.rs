//! The storages and formats that a build adds to those of the facade.

use std::fmt;
use std::sync::Arc;

use dcp::StorageRegistry;
use dcp::core::format::{CheckpointFormat, FormatRegistry, StreamTransform};
use dcp::jobs::Format;
use dcp::jobs::framework::{Framework, Frameworks};

type Register = dyn Fn(&mut StorageRegistry) + Send + Sync;

/// What the command recognizes and opens.
pub(crate) struct Plugins {
    /// Each registers storages after those of the facade.
    pub(crate) storages: Vec<Box<Register>>,
    formats: FormatRegistry,
    frameworks: Frameworks,
    targets: Vec<&'static str>,
}

/// The name of a format to write, and a line about it.
pub(crate) type Target = (&'static str, &'static str);

impl Default for Plugins {
    fn default() -> Self {
        let (formats, frameworks) =
            (dcp::plugins::default_formats(), dcp::plugins::default_frameworks());
        Self { storages: Vec::new(), formats, frameworks, targets: Vec::new() }
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

    /// Adds a transform of stored items; it replaces one of the same name.
    pub(crate) fn add_transform(&mut self, transform: Arc<dyn StreamTransform>) {
        self.formats = std::mem::take(&mut self.formats).with_transform(transform);
    }

    /// Adds a framework; it replaces one of the same name.
    pub(crate) fn add_framework(&mut self, framework: Arc<dyn Framework>) {
        self.frameworks = std::mem::take(&mut self.frameworks).with(framework);
    }

    /// What checkpoints can be written in beside the formats of the library: targets of frameworks, and
    /// added formats.
    pub(crate) fn targets(&self) -> Vec<Target> {
        let frameworks = self.frameworks.targets();
        let frameworks = frameworks.map(|(_, target)| (target.name(), target.description()));
        let added = self.targets.iter().map(|name| (*name, Format::Registered(name).description()));
        frameworks.chain(added).collect()
    }

    /// All frameworks.
    pub(crate) fn frameworks(&self) -> Frameworks {
        self.frameworks.clone()
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
            .field("frameworks", &self.frameworks)
            .field("targets", &self.targets)
            .finish_non_exhaustive()
    }
}
