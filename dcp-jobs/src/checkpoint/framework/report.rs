//! Reports of plug-ins.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::error::{Error, ErrorKind};

/// A report of a plug-in: of its own type for a program that names the plug-in, and as JSON for all others.
#[derive(Clone)]
pub struct PluginReport {
    name: &'static str,
    typed: Arc<dyn Any + Send + Sync>,
    json: Value,
}

impl PluginReport {
    /// The report of the plug-in `name`.
    ///
    /// # Errors
    ///
    /// [`Io`](ErrorKind::Io) when it cannot be written as JSON.
    pub fn new<T>(name: &'static str, report: T) -> Result<Self, Error>
    where
        T: Serialize + Send + Sync + 'static,
    {
        let json = serde_json::to_value(&report).map_err(|error| {
            Error::new(ErrorKind::Io, format!("cannot write the report of {name}")).because(error)
        })?;
        Ok(Self { name, typed: Arc::new(report), json })
    }

    /// The name of the plug-in.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The report, if it is of this type.
    #[must_use]
    pub fn get<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.typed.downcast_ref()
    }

    /// The report as JSON.
    #[must_use]
    pub fn json(&self) -> &Value {
        &self.json
    }
}

impl fmt::Debug for PluginReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PluginReport").field("name", &self.name).field("json", &self.json).finish()
    }
}

impl Serialize for PluginReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.json.serialize(serializer)
    }
}
